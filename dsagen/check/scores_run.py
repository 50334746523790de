"""Running one case of the indexer's logits in any form: inputs, poisoned scores, the call, every column compared."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from dsagen.check.indexer_cases import REPEATS, Contents, LogitsCase, Probe
from dsagen.check.outputs import GuardedTensor
from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.check.ragged_cases import RaggedCase
from dsagen.families.indexer_logits.hopper import sums_e4m3
from dsagen.index_format import IndexFormat, index_format
from dsagen.matrix import Matrix
from dsagen.spec import IndexSpec

SCORE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_REPLAYS = 4
# Errors of fp32 sums over dims and heads, in units of the sum of all magnitudes.
SUM_ERROR = 2.0**-18
# Of products that keep 13 bits below the largest that they sum. Contents of one magnitude showed up to 2^-14, others,
# of which few large products make most of a sum while the rest lose their bits, up to 2^-10.5.
SHORT_SUM_ERRORS = {Contents.NORMAL: 2.0**-12, Contents.LARGE: 2.0**-9}
_BF16_ERROR = 2.0**-8

CaseT = TypeVar("CaseT", bound=Any)
KernelsT = TypeVar("KernelsT", bound=Any)
InputsT = TypeVar("InputsT", bound=Any)


@dataclass(frozen=True)
class ScoresRun(ABC, Generic[CaseT, KernelsT, InputsT]):
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: CaseT
    kernels: Callable[[CaseT], KernelsT]
    device: torch.device
    seed: int
    form: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Of the scores."""

    @property
    @abstractmethod
    def strided(self) -> bool:
        """Whether tensors have gaps."""

    @abstractmethod
    def draw(self, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> InputsT:
        """Inputs of the case."""

    @abstractmethod
    def invoke(self, kernels: KernelsT, inputs: InputsT, out: Tensor) -> Tensor:
        """Run the op on the current stream."""

    @abstractmethod
    def compare_scores(self, inputs: InputsT, record: IndexFormat, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or was not to be written."""

    @abstractmethod
    def parts(self, inputs: InputsT) -> Iterator[tuple[str, slice, InputsT]]:
        """What a call by itself may be made of: its name, its rows of scores and its inputs, in the same memory."""

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
                _replay(self, kernels)
            case Probe.ALONE:
                inputs, outputs = self._plain(kernels)
                for name, rows, part in self.parts(inputs):
                    one = self.outputs(kernels)
                    self.call(kernels, part, one.view[rows])
                    require_same_bits(f"{name} by itself", one.view[rows], outputs.view[rows])

    def inputs(self, kernels: KernelsT, variation: int = 0) -> InputsT:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        index = kernels.spec.index
        return self.draw(index_format(index.keys), index, generator)

    def outputs(self, kernels: KernelsT) -> GuardedTensor:
        """Poisoned scores between guard zones."""
        return GuardedTensor.outputs(self.shape, SCORE_DTYPES[str(kernels.spec.scores)], self.device, self.strided)

    def call(self, kernels: KernelsT, inputs: InputsT, out: Tensor) -> None:
        """Run the op on the current stream. WrongResultError where it returns anything but the output it was given."""
        if self.invoke(kernels, inputs, out).data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")

    def compare(self, kernels: KernelsT, inputs: InputsT, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or a write outside of the scores."""
        self.compare_scores(inputs, index_format(kernels.spec.index.keys), outputs)
        # Last, since it poisons what was written.
        written = outputs.written_outside()
        if written:
            raise WrongResultError(f"{written} elements outside of the scores were written")

    def _plain(self, kernels: KernelsT) -> tuple[InputsT, GuardedTensor]:
        inputs, outputs = self.inputs(kernels), self.outputs(kernels)
        self.call(kernels, inputs, outputs.view)
        kept = outputs.view.clone()
        self.compare(kernels, inputs, outputs)
        outputs.view.copy_(kept)
        return inputs, outputs


def _replay(run: ScoresRun[Any, Any, Any], kernels: Any) -> None:
    """Capture the call of a run and replay it with other contents. NotRunError for want of a device."""
    device = run.device
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


def has_short_sums(matrix: Matrix) -> bool:
    """Whether a kernel of these sums products of e4m3 operands in fewer bits than fp32 has."""
    return any(plan.variant.family == LogitsCase.op and sums_e4m3(plan) for plan in matrix.plans())


def is_exact(contents: Contents) -> bool:
    """Whether every sum of such contents is exact, in any order."""
    return contents not in (Contents.NORMAL, Contents.LARGE)


def differs_exactly(found: Tensor, want: Tensor) -> Tensor:
    """Where scores are not what the reference's round to; NaN equals NaN."""
    rounded = want.to(found.dtype)
    return (found != rounded) & ~(found.isnan() & rounded.isnan())


def differs_more(found: Tensor, want: Tensor, size: Tensor, of_size: float = SUM_ERROR) -> Tensor:
    """Where scores differ by more than their sums may, of fp32 by default, whose magnitudes sum to `size`."""
    bound = size * of_size
    if found.dtype is torch.bfloat16:
        bound = bound + want.abs() * _BF16_ERROR
    error = (found.double() - want).abs()
    return ~((error <= bound) | (found.double() == want))


def require_scores(
    case: LogitsCase | RaggedCase,
    outputs: GuardedTensor,
    want: Tensor,
    scored: Tensor,
    filled: Tensor | None,
    size: Callable[[], Tensor],
) -> None:
    """WrongResultError for the first column that is not as `want` has it where `scored`, -inf where `filled`, or left
    alone elsewhere. `size` gives the magnitudes that scores are sums of, asked for where these are not exact.
    """
    found, outside = outputs.view, ~scored
    if filled is not None:
        require_none("columns outside of the window", found, filled & (found != -torch.inf), want)
        outside &= ~filled
    untouched = found.view(outputs.whole.dtype) == outputs.poison
    require_none("columns that nothing should write", found, outside & ~untouched, want)
    if is_exact(case.contents):
        bad = differs_exactly(found, want)
    else:
        bad = differs_more(found, want, size(), SHORT_SUM_ERRORS[case.contents] if case.short_sums else SUM_ERROR)
    require_none("scores", found, scored & bad, want)


def magnitudes_of_codes(record: IndexFormat, codes: Tensor) -> Tensor:
    """Codes without their signs."""
    unsigned = codes.view(torch.uint8) & (0x7F if record.values.bits == 8 else 0x77)
    return unsigned.view(codes.dtype)


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
