"""Running one case of top-k on a device: inputs, the call, and the comparison, which is for equality."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.check.topk_calls import ORDER, SET, TopkCalls, TopkKernels, topk_calls
from dsagen.check.topk_cases import FAR_OUT_ELEMENTS, REPEATS, Probe, TopkCase
from dsagen.check.topk_inputs import TopkInputs, make_inputs, poison_outside
from dsagen.families.topk.op import CANDIDATE_BLOCK
from dsagen.families.topk.reference import NONE, topk_reference, translate_reference

_POISON = -77
_GAP = 5  # columns behind each row of outputs
_REPLAYS = 4
# Columns of the longest row while a graph is captured; replays have longer ones.
_CAPTURED_COLUMNS = 1000
_CHURN_BYTES = 64 << 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Run = Callable[[], None]


@dataclass(frozen=True)
class TopkOutputs:
    """Poisoned outputs in rows with a gap behind them; raw and counts may be left out."""

    out: Tensor
    raw: Tensor | None
    counts: Tensor | None

    @classmethod
    def make(cls, case: TopkCase, device: torch.device) -> TopkOutputs:
        """Outputs of a case."""

        def poisoned(*shape: int) -> Tensor:
            return torch.full(shape, _POISON, dtype=torch.int32, device=device)

        columns = case.k + _GAP
        if case.far_out:
            buffer = torch.empty((case.rows - 1) * FAR_OUT_ELEMENTS + columns, dtype=torch.int32, device=device)
            out = buffer.as_strided((case.rows, columns), (FAR_OUT_ELEMENTS, 1)).fill_(_POISON)
        else:
            out = poisoned(case.rows, columns)
        return cls(out, poisoned(case.rows, columns), poisoned(case.rows)) if case.extras else cls(out, None, None)

    def poison(self) -> None:
        """As if nothing had been written."""
        for tensor in (self.out, self.raw, self.counts):
            if tensor is not None:
                tensor.fill_(_POISON)


def cuda_capture(call: Run, device: torch.device) -> Run:
    """The call as a captured graph, to be replayed. NotRunError without a CUDA device."""
    if device.type != "cuda":
        raise NotRunError("needs a CUDA device")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return replay


@dataclass(frozen=True)
class TopkRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw.

    `capture` makes of a call what replays it. `launched` gets the names of the kernels that the case has launched.
    """

    case: TopkCase
    kernels: Callable[[TopkCase], TopkKernels]
    device: torch.device
    seed: int
    capture: Callable[[Run, torch.device], Run] = cuda_capture
    launched: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        kernels = self.kernels(self.case)
        match self.case.probe:
            case Probe.PLAIN:
                self._plain(kernels, self.inputs(kernels))
            case Probe.REPEATED:
                self._repeat(kernels)
            case Probe.GRAPH:
                self._replay(kernels)
            case Probe.PERMUTED:
                self._permute(kernels)
            case Probe.ALONE:
                self._alone(kernels)

    def inputs(self, kernels: TopkKernels, variation: int = 0) -> TopkInputs:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        assert kernels.spec.scores is not None
        return make_inputs(self.case, _DTYPES[kernels.spec.scores], self.device, generator)

    def calls(self, kernels: TopkKernels, rows: int | None = None) -> TopkCalls:
        """Calls of the case's shape, or of other rows."""
        case = self.case
        return topk_calls(kernels, case.rows if rows is None else rows, case.width, case.k, case.mode)

    def call(self, calls: TopkCalls, inputs: TopkInputs, outputs: TopkOutputs) -> None:
        """Run the op on the current stream."""
        k = self.case.k
        out = outputs.out[:, :k]
        wanted = {"raw": None if outputs.raw is None else outputs.raw[:, :k], "counts": outputs.counts}
        extras = {name: tensor for name, tensor in wanted.items() if tensor is not None}
        self.launched.update(calls.slugs(inputs.scores, inputs.windows.get("starts")))
        found = calls(
            inputs.scores,
            drop_neg_inf=self.case.drop_neg_inf,
            out=out,
            **extras,
            **inputs.windows,
            **inputs.transform,
        )
        if found.data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")

    def compare(self, inputs: TopkInputs, outputs: TopkOutputs) -> None:
        """WrongResultError for the first slot that differs from the reference, or a write outside of the slots."""
        case = self.case
        indices, counts = topk_reference(inputs.scores, case.k, drop_neg_inf=case.drop_neg_inf, **inputs.windows)
        if outputs.counts is not None:
            _require_equal("counts", outputs.counts[:, None], counts[:, None])
        if case.mode != ORDER:
            assert outputs.raw is not None, "what weaker promises leave open is judged by raw"
            indices = self._admissible(inputs, outputs.raw[:, : case.k].long(), indices, counts)
        transform = dict(inputs.transform)
        if "candidate_blocks" in transform:
            transform = {"page_table": transform["candidate_blocks"], "page_size": CANDIDATE_BLOCK}
        gap = torch.full((len(indices), _GAP), _POISON, device=self.device)
        if outputs.raw is not None:
            _require_equal("raw", outputs.raw, torch.cat([indices, gap], 1))
        _require_equal("out", outputs.out, torch.cat([translate_reference(indices, **transform), gap], 1))

    def _admissible(self, inputs: TopkInputs, raw: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        """`raw` if it keeps the case's promise against the reference; WrongResultError otherwise."""
        case = self.case
        behind = torch.arange(case.k, device=self.device) >= counts[:, None]
        _require_equal("raw behind the count", torch.where(behind, raw, 0), torch.where(behind, NONE, 0))
        _require_equal("raw before the count", (raw < 0) & ~behind, torch.zeros_like(raw))
        if not case.drop_neg_inf:
            # A row that is taken whole is not read, so there is nothing that could change its order.
            whole = counts < case.k
            _require_equal("raw of whole rows", raw[whole], indices[whole])
        ordered = torch.where(raw < 0, case.width, raw).sort(-1).values
        wanted = torch.where(indices < 0, case.width, indices)
        if case.mode == SET:
            _require_equal("raw as a set", ordered, wanted)
            return raw
        if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < case.width)).any()):
            raise WrongResultError("raw has an index twice")
        if bool((raw >= case.width).any()):
            raise WrongResultError("raw has an index past the row")
        for name, found, want in zip(
            ("NaN", "scores"), _values(inputs, ordered, counts), _values(inputs, wanted, counts), strict=True
        ):
            if not torch.equal(found, want):
                row = int((found != want).reshape(case.rows, -1).any(-1).nonzero()[0])
                raise WrongResultError(f"raw[{row}] does not select the {name} that a sort does")
        return raw

    def _plain(self, kernels: TopkKernels, inputs: TopkInputs) -> TopkOutputs:
        outputs = TopkOutputs.make(self.case, self.device)
        self.call(self.calls(kernels), inputs, outputs)
        self.compare(inputs, outputs)
        return outputs

    def _repeat(self, kernels: TopkKernels) -> None:
        inputs, outputs = self.inputs(kernels), TopkOutputs.make(self.case, self.device)
        calls = self.calls(kernels)
        self.call(calls, inputs, outputs)
        self.compare(inputs, outputs)
        # Without a promised order the set is what repeats.
        first = outputs.out.clone() if self.case.mode == ORDER else outputs.out.sort(-1).values
        for number in range(2, REPEATS + 1):
            outputs.poison()
            self.call(calls, inputs, outputs)
            again = outputs.out if self.case.mode == ORDER else outputs.out.sort(-1).values
            _require_equal(f"run {number}: out", again, first.long())

    def _replay(self, kernels: TopkKernels) -> None:
        kernels.prepare()
        inputs, outputs = self.inputs(kernels), TopkOutputs.make(self.case, self.device)
        # What a host decides by lengths would be decided for short rows.
        inputs.windows["lengths"].clamp_(max=_CAPTURED_COLUMNS)
        poison_outside(inputs.scores, inputs.windows)
        calls = self.calls(kernels)
        replay = self.capture(lambda: self.call(calls, inputs, outputs), self.device)
        for number in range(_REPLAYS):
            inputs.copy_from(self.inputs(kernels, variation=number))
            outputs.poison()
            churned = self._churn()
            replay()
            del churned
            self.compare(inputs, outputs)

    def _churn(self) -> list[Tensor]:
        """Fresh allocations full of ones: whatever a capture let go of is written over."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        sizes = (1 << 10, 1 << 16, 1 << 20, _CHURN_BYTES)
        return [torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device) for size in sizes for _ in range(4)]

    def _permute(self, kernels: TopkKernels) -> None:
        """The same scores in columns of another order: both results are right, and hold equal scores."""
        inputs = self.inputs(kernels)
        first = self._plain(kernels, inputs)
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        order = torch.randperm(self.case.width, device=self.device, generator=generator)
        moved = replace(inputs, scores=inputs.scores[:, order].contiguous())
        second = self._plain(kernels, moved)
        k, whole = self.case.k, torch.full((self.case.rows,), self.case.k, device=self.device)
        found = _values(inputs, first.out[:, :k].long(), whole), _values(moved, second.out[:, :k].long(), whole)
        if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
            raise WrongResultError("columns in another order select other scores")

    def _alone(self, kernels: TopkKernels) -> None:
        """Rows in batches of other sizes, so on other grids: as in the whole batch."""
        assert not self.inputs(kernels).transform, "tables would have to be split too"
        case, inputs = self.case, self.inputs(kernels)
        whole = self._plain(kernels, inputs)
        for size in (1, case.rows - 1):
            for first in range(0, case.rows - size + 1, size):
                part = slice(first, first + size)
                some = TopkInputs(
                    inputs.scores[part],
                    {name: tensor[part] for name, tensor in inputs.windows.items()},
                    inputs.transform,
                )
                outputs = TopkOutputs.make(replace(case, rows=size), self.device)
                self.call(self.calls(kernels, rows=size), some, outputs)
                name = f"rows {first}..{first + size - 1} in a batch of {size} instead of {case.rows}: out"
                _require_equal(name, outputs.out, whole.out[part].long())


def _values(inputs: TopkInputs, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """(NaN of each row, sorted scores) that indices [rows, k] select; NaN count as -inf, slots past the count too."""
    starts = inputs.windows.get("starts")
    columns = indices if starts is None else indices + starts.long()[:, None]
    slot = torch.arange(indices.shape[1], device=indices.device)
    chosen = inputs.scores.gather(1, columns.clamp(0, inputs.scores.shape[1] - 1)).float()
    chosen = chosen.masked_fill(slot >= counts[:, None], -torch.inf)
    nan = chosen.isnan()
    return nan.sum(-1), chosen.masked_fill(nan, -torch.inf).sort(-1).values


def _require_equal(name: str, found: Tensor, wanted: Tensor) -> None:
    different = found.long() != wanted
    count = int(different.sum())
    if count:
        row, slot = different.nonzero()[0].tolist()
        value = int(found[row, slot])
        text = "which was not written" if value == _POISON else "which is nothing" if value == NONE else "an id"
        raise WrongResultError(
            f"{name}[{row}, {slot}] = {value} ({text}), expected {int(wanted[row, slot])}; {count} slots differ"
        )
