"""Running one case of top-k on a device: inputs, the call, and the comparison, which is for equality."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.check.topk_cases import FAR_ROW_ELEMENTS, REPEATS, Ids, Probe, Scores, TopkCase, Windows
from dsagen.families.topk.op import CANDIDATE_BLOCK
from dsagen.families.topk.reference import NONE, topk_reference, translate_reference
from dsagen.spec import DeploymentSpec

_POISON = -77
_GAP = 5  # columns behind each row of scores and outputs
_REPLAYS = 3
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TopkKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def topk(self, scores: Tensor, *, k: int, **options: Any) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class TopkInputs:
    """A call's tensors: scores, the window's by name, the transform's by name."""

    scores: Tensor
    windows: dict[str, Tensor]
    transform: dict[str, Any]

    def copy_from(self, other: TopkInputs) -> None:
        """Take another's contents, in place."""
        self.scores.copy_(other.scores)
        for name, tensor in self.windows.items():
            tensor.copy_(other.windows[name])
        for name, value in self.transform.items():
            if isinstance(value, Tensor):
                value.copy_(other.transform[name])


@dataclass(frozen=True)
class TopkOutputs:
    """Poisoned outputs in rows with a gap behind them."""

    out: Tensor
    raw: Tensor
    counts: Tensor

    @classmethod
    def make(cls, rows: int, k: int, device: torch.device) -> TopkOutputs:
        """Outputs for rows of k slots."""

        def poisoned(*shape: int) -> Tensor:
            return torch.full(shape, _POISON, dtype=torch.int32, device=device)

        return cls(poisoned(rows, k + _GAP), poisoned(rows, k + _GAP), poisoned(rows))

    def poison(self) -> None:
        """As if nothing had been written."""
        for tensor in (self.out, self.raw, self.counts):
            tensor.fill_(_POISON)


@dataclass(frozen=True)
class TopkRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: TopkCase
    kernels: Callable[[TopkCase], TopkKernels]
    device: torch.device
    seed: int

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        kernels = self.kernels(self.case)
        outputs = TopkOutputs.make(self.case.rows, self.case.k, self.device)
        match self.case.probe:
            case Probe.GRAPH:
                self._replay(kernels, outputs)
            case Probe.REPEATED:
                self._repeat(kernels, outputs)
            case Probe.PLAIN:
                inputs = self.inputs(kernels)
                self.call(kernels, inputs, outputs)
                self.compare(inputs, outputs)

    def inputs(self, kernels: TopkKernels, variation: int = 0) -> TopkInputs:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        assert kernels.spec.scores is not None
        return make_inputs(self.case, _DTYPES[kernels.spec.scores], self.device, generator)

    def call(self, kernels: TopkKernels, inputs: TopkInputs, outputs: TopkOutputs) -> None:
        """Run the op on the current stream."""
        k = self.case.k
        out = outputs.out[:, :k]
        found = kernels.topk(
            inputs.scores,
            k=k,
            drop_neg_inf=self.case.drop_neg_inf,
            out=out,
            raw=outputs.raw[:, :k],
            counts=outputs.counts,
            **inputs.windows,
            **inputs.transform,
        )
        if found.data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")

    def compare(self, inputs: TopkInputs, outputs: TopkOutputs) -> None:
        """WrongResultError for the first slot that differs from the reference, or a write outside of the slots."""
        case = self.case
        indices, counts = topk_reference(inputs.scores, case.k, drop_neg_inf=case.drop_neg_inf, **inputs.windows)
        transform = dict(inputs.transform)
        if "candidate_blocks" in transform:
            transform = {"page_table": transform["candidate_blocks"], "page_size": CANDIDATE_BLOCK}
        gap = torch.full((case.rows, _GAP), _POISON, device=self.device)
        _require_equal("counts", outputs.counts[:, None], counts[:, None])
        _require_equal("raw", outputs.raw, torch.cat([indices, gap], 1))
        _require_equal("out", outputs.out, torch.cat([translate_reference(indices, **transform), gap], 1))

    def _repeat(self, kernels: TopkKernels, outputs: TopkOutputs) -> None:
        inputs = self.inputs(kernels)
        self.call(kernels, inputs, outputs)
        self.compare(inputs, outputs)
        first = outputs.out.clone()
        for number in range(2, REPEATS + 1):
            outputs.poison()
            self.call(kernels, inputs, outputs)
            _require_equal(f"run {number}: out", outputs.out, first.long())

    def _replay(self, kernels: TopkKernels, outputs: TopkOutputs) -> None:
        if self.device.type != "cuda":
            raise NotRunError("needs a CUDA device")
        kernels.prepare()
        inputs = self.inputs(kernels)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.call(kernels, inputs, outputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            self.call(kernels, inputs, outputs)
        for replay in range(_REPLAYS):
            inputs.copy_from(self.inputs(kernels, variation=replay))
            outputs.poison()
            graph.replay()
            torch.cuda.synchronize(self.device)
            self.compare(inputs, outputs)


def make_inputs(case: TopkCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> TopkInputs:
    """Random inputs of a case. Everything outside of the rows is NaN."""
    windows = _windows(case, device, generator)
    stride = FAR_ROW_ELEMENTS if case.far else case.width + _GAP
    elements = case.misaligned + (case.rows - 1) * stride + case.width + _GAP
    # A far row's gap is too large to be filled.
    buffer = torch.empty(elements, dtype=dtype, device=device)
    if not case.far:
        buffer.fill_(torch.nan)
    scores = buffer.as_strided((case.rows, case.width), (stride, 1), case.misaligned)
    scores.copy_(_scores(case, device, generator))
    if case.windows is Windows.BOTH:
        column = torch.arange(case.width, device=device)
        first, last = windows["starts"][:, None], (windows["starts"] + windows["lengths"])[:, None]
        outside = (column < first) | (column >= last)
        scores[outside] = torch.where(column % 2 == 0, torch.nan, torch.inf).to(dtype).expand(case.rows, -1)[outside]
    return TopkInputs(scores, windows, _transform(case, device, generator))


def _windows(case: TopkCase, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    if case.windows is Windows.WHOLE:
        return {}

    def draw(most: int) -> Tensor:
        return torch.randint(0, most + 1, (case.rows,), device=device, generator=generator, dtype=torch.int32)

    lengths = draw(case.width)
    special = torch.tensor([case.width, 0, case.k - 1, case.k, case.k + 1, -3, 1], dtype=torch.int32, device=device)
    special = special[: case.rows].clamp(max=case.width)
    lengths[: len(special)] = special
    if case.windows is Windows.LENGTHS:
        return {"lengths": lengths}
    starts = torch.minimum(draw(case.width), case.width - lengths.clamp(min=0))
    return {"lengths": lengths, "starts": starts.to(torch.int32)}


def _scores(case: TopkCase, device: torch.device, generator: torch.Generator) -> Tensor:
    """fp32 [rows, width]."""
    shape = (case.rows, case.width)

    def normal() -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator)

    def from_bits(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    def choose(*values: float) -> Tensor:
        return torch.tensor(values, device=device)[integers(0, len(values))]

    column = torch.arange(case.width, device=device).expand(shape)
    match case.scores:
        case Scores.NORMAL:
            return normal()
        case Scores.LOW_10_BITS:
            return from_bits(0x3F900000 + integers(0, 1 << 10))
        case Scores.LOW_21_BITS:
            return from_bits(0x3F800000 + integers(0, 1 << 21))
        case Scores.ONE_BIN:
            return from_bits(0x3F912344 + integers(0, 2))
        case Scores.CONSTANT:
            return torch.full(shape, 3.25, device=device)
        case Scores.ASCENDING:
            return column.float()
        case Scores.DESCENDING:
            return -column.float()
        case Scores.TWO_VALUES:
            return choose(1.0, 2.0)
        case Scores.PLATEAU:
            return (normal() - 2.0).relu()
        case Scores.ZEROS:
            return choose(0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 1e-45, -1e-45)
        case Scores.ANY_BITS:
            return from_bits(integers(-(1 << 31), 1 << 31))
        case Scores.SOME_NAN:
            return normal().masked_fill(integers(0, 3) > 0, torch.nan)
        case Scores.ALL_NAN:
            return from_bits(0x7FC00000 + integers(0, 1 << 22))
        case Scores.ALL_NEG_INF:
            return torch.full(shape, -torch.inf, device=device)
        case Scores.NEG_INF_TAIL:
            return normal().masked_fill(column >= case.width // 40, -torch.inf)
        case Scores.INFINITIES:
            return choose(torch.inf, -torch.inf, -torch.inf, -torch.inf, 1.0, torch.nan)


def _transform(case: TopkCase, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator, dtype=torch.int32)

    pages = case.width // case.page_size + 3
    match case.ids:
        case Ids.LOGICAL:
            return {}
        case Ids.OFFSET:
            return {"offsets": draw(0, 1 << 30, case.rows)}
        case Ids.BLOCKS:
            return {"candidate_blocks": draw(0, 1 << 27, case.rows, case.width // CANDIDATE_BLOCK + 1)}
        case Ids.PAGED:
            return {
                "page_table": draw(-2, (1 << 31) // case.page_size - 1, case.rows, pages),
                "page_size": case.page_size,
            }
        case Ids.MAPPED:
            # Some rows have no table, some windows run past the last page.
            return {
                "page_table": draw(0, 1 << 20, 7, pages),
                "page_size": case.page_size,
                "table_of_row": draw(-1, 8, case.rows),
                "table_starts": draw(0, 6, case.rows),
            }


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
