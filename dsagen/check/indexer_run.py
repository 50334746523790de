"""Running one case of the indexer's logits on a device: poisoned scores, the call, every column compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.indexer_cases import REPEATS, Contents, LogitsCase, Probe
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs
from dsagen.check.outputs import GuardedTensor
from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.families.indexer_logits.reference import limits_reference, logits_reference
from dsagen.index_format import SCALE_WORD_BYTES, IndexFormat, index_format
from dsagen.spec import DeploymentSpec

SCORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REPLAYS = 4
# Errors of fp32 sums over dims and heads, in units of the sum of all magnitudes.
_SUM_ERROR = 2.0**-18
# Of products that keep 13 bits below the largest that they sum. Contents of one magnitude showed up to 2^-14, others,
# of which few large products make most of a sum while the rest lose their bits, up to 2^-10.5.
_SHORT_SUM_ERRORS = {Contents.NORMAL: 2.0**-12, Contents.LARGE: 2.0**-9}
_BF16_ERROR = 2.0**-8


class LogitsKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def indexer_logits(  # noqa: D102
        self, q: Tensor, k_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, **options: Any
    ) -> Tensor: ...


@dataclass(frozen=True)
class LogitsRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: LogitsCase
    kernels: Callable[[LogitsCase], LogitsKernels]
    device: torch.device
    seed: int
    form = "paged"

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        kernels = self.kernels(self.case)
        match self.case.probe:
            case Probe.PLAIN:
                self._plain(kernels)
            case Probe.REPEATED:
                inputs, outputs = self._plain(kernels)
                first = outputs.view.clone()
                for number in range(2, REPEATS + 1):
                    outputs.poison_again()
                    self.call(kernels, inputs, outputs.view)
                    require_same_bits(f"run {number}", outputs.view, first)
            case Probe.GRAPH:
                replay(self, kernels)
            case Probe.ALONE:
                self._alone(kernels)

    def inputs(self, kernels: LogitsKernels, variation: int = 0) -> LogitsInputs:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        index = kernels.spec.index
        assert index is not None, "a spec with the op has an index"
        return make_inputs(self.case, index_format(index.keys), index, generator)

    def outputs(self, kernels: LogitsKernels) -> GuardedTensor:
        """Poisoned scores between guard zones."""
        case, dtype = self.case, SCORE_DTYPES[str(kernels.spec.scores)]
        return GuardedTensor.outputs((case.rows, case.width), dtype, self.device, case.strided)

    def call(self, kernels: LogitsKernels, inputs: LogitsInputs, out: Tensor) -> None:
        """Run the op on the current stream."""
        case = self.case
        options: dict[str, Any] = {"unscored_up_to": case.unscored, "fill_neg_inf": case.fill, **inputs.named}
        found = kernels.indexer_logits(*inputs.tensors, out=out, **options)
        if found.data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")

    def compare(self, kernels: LogitsKernels, inputs: LogitsInputs, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or a write outside of the windows."""
        case, index = self.case, kernels.spec.index
        assert index is not None
        record = index_format(index.keys)
        want, scored = logits_reference(
            *inputs.tensors, record, case.width, unscored_up_to=case.unscored, **inputs.named
        )
        found = outputs.view
        integer = found.view(outputs.whole.dtype)
        outside = ~scored
        if case.fill:
            most = min(case.width, inputs.block_table.shape[1] * case.page_size)
            limits = limits_reference(inputs.context_lens, case.batch, case.next_n, most).flatten()
            behind = torch.arange(case.width, device=self.device) >= limits[:, None]
            require_none("columns behind the window", found, behind & (found != -torch.inf), want)
            outside &= ~behind
        require_none("columns that nothing should write", found, outside & (integer != outputs.poison), want)
        require_none("scores", found, scored & self._differs(found, want, inputs, record), want)
        # Last, since it poisons what was written.
        written = outputs.written_outside()
        if written:
            raise WrongResultError(f"{written} elements outside of the scores were written")

    def _differs(self, found: Tensor, want: Tensor, inputs: LogitsInputs, record: IndexFormat) -> Tensor:
        if is_exact(self.case.contents):
            return differs_exactly(found, want)
        sized = with_magnitudes(record, inputs)
        size, _ = logits_reference(*sized.tensors, record, self.case.width, q_scales=inputs.q_scales)
        error = _SHORT_SUM_ERRORS[self.case.contents] if self.case.short_sums else _SUM_ERROR
        return differs_more(found, want, size, error)

    def _plain(self, kernels: LogitsKernels) -> tuple[LogitsInputs, GuardedTensor]:
        inputs, outputs = self.inputs(kernels), self.outputs(kernels)
        self.call(kernels, inputs, outputs.view)
        kept = outputs.view.clone()
        self.compare(kernels, inputs, outputs)
        outputs.view.copy_(kept)
        return inputs, outputs

    def _alone(self, kernels: LogitsKernels) -> None:
        inputs, outputs = self._plain(kernels)
        next_n = self.case.next_n
        for request in range(self.case.batch):
            one = self.outputs(kernels)
            rows = slice(request * next_n, (request + 1) * next_n)
            self.call(kernels, inputs.request(request), one.view[rows])
            require_same_bits(f"request {request} by itself", one.view[rows], outputs.view[rows])


def replay(run: Any, kernels: Any) -> None:
    """Capture the call of a run and replay it with other contents. NotRunError for want of a device."""
    device: torch.device = run.device
    if device.type != "cuda":
        raise NotRunError("needs a CUDA device")
    kernels.prepare()
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run.call(kernels, inputs, outputs.view)
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        run.call(kernels, inputs, outputs.view)
    for variation in range(_REPLAYS):
        inputs.copy_from(run.inputs(kernels, variation))
        outputs.poison_again()
        graph.replay()
        torch.cuda.synchronize(device)
        run.compare(kernels, inputs, outputs)


def is_exact(contents: Contents) -> bool:
    """Whether every sum of such contents is exact, in any order."""
    return contents not in (Contents.NORMAL, Contents.LARGE)


def differs_exactly(found: Tensor, want: Tensor) -> Tensor:
    """Where scores are not what the reference's round to; NaN equals NaN."""
    rounded = want.to(found.dtype)
    return (found != rounded) & ~(found.isnan() & rounded.isnan())


def differs_more(found: Tensor, want: Tensor, size: Tensor, of_size: float = _SUM_ERROR) -> Tensor:
    """Where scores differ by more than their sums may, of fp32 by default, whose magnitudes sum to `size`."""
    bound = size * of_size
    if found.dtype is torch.bfloat16:
        bound = bound + want.abs() * _BF16_ERROR
    error = (found.double() - want).abs()
    return ~((error <= bound) | (found.double() == want))


def magnitudes_of_codes(record: IndexFormat, codes: Tensor) -> Tensor:
    """Codes without their signs."""
    unsigned = codes.view(torch.uint8) & (0x7F if record.values.bits == 8 else 0x77)
    return unsigned.view(codes.dtype)


def with_magnitudes(record: IndexFormat, inputs: LogitsInputs) -> LogitsInputs:
    """Inputs whose sums are those of magnitudes: |q|, |k| and |w| in place of q, k and w."""
    return replace(
        inputs,
        q=magnitudes_of_codes(record, inputs.q),
        k_cache=_magnitudes(record, inputs.k_cache),
        weights=inputs.weights.abs(),
    )


def _magnitudes(record: IndexFormat, cache: Tensor) -> Tensor:
    """A cache whose codes have no sign; scales have none."""
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage()).clone()
    pages, page_size, _, record_bytes = cache.shape
    code_bytes = record_bytes - SCALE_WORD_BYTES
    page = storage.as_strided((pages, page_size * code_bytes), (cache.stride(0), 1))
    page.copy_(magnitudes_of_codes(record, page))
    return storage.as_strided(cache.shape, cache.stride())


def require_none(what: str, found: Tensor, bad: Tensor, want: Tensor) -> None:
    """WrongResultError for the first score that is bad."""
    count = int(bad.sum())
    if count:
        row, column = bad.nonzero()[0].tolist()
        value = float(found[row, column])
        raise WrongResultError(
            f"{what}: scores[{row}, {column}] = {value:.9g}, expected {float(want[row, column]):.9g}; {count} differ"
        )


def require_same_bits(what: str, found: Tensor, first: Tensor) -> None:
    """WrongResultError for the first score that is not the same to the bit."""
    integer = torch.int16 if found.dtype is torch.bfloat16 else torch.int32
    different = found.contiguous().view(integer) != first.contiguous().view(integer)
    if bool(different.any()):
        row, column = different.nonzero()[0].tolist()
        raise WrongResultError(
            f"{what}: scores[{row}, {column}] = {float(found[row, column]):.9g}, before {float(first[row, column]):.9g}"
        )
