"""Running one case of the logits in candidate blocks: inputs, poisoned scores, the call, every column compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.candidate_cases import CandidateCase, Lists
from dsagen.check.indexer_cases import REPEATS, Probe
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs, whole_storage
from dsagen.check.indexer_run import (
    SCORE_DTYPES,
    differs_exactly,
    differs_more,
    is_exact,
    replay,
    require_none,
    require_same_bits,
    with_magnitudes,
)
from dsagen.check.outputs import GuardedTensor
from dsagen.check.probes import WrongResultError
from dsagen.families.indexer_logits.reference import candidates_reference, limits_reference
from dsagen.index_format import IndexFormat, index_format
from dsagen.spec import DeploymentSpec, IndexSpec


@dataclass(frozen=True)
class CandidateInputs:
    """Tensors of one call."""

    paged: LogitsInputs
    blocks: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that every call has, in the order of the op's arguments."""
        return (*self.paged.tensors, self.blocks)

    def copy_from(self, other: CandidateInputs) -> None:
        """Take another's contents, in place."""
        self.paged.copy_from(other.paged)
        whole_storage(self.blocks).copy_(whole_storage(other.blocks))

    def request(self, index: int) -> CandidateInputs:
        """The tensors of one request, in the same memory."""
        next_n = self.paged.q.shape[1]
        return CandidateInputs(self.paged.request(index), self.blocks[index * next_n : (index + 1) * next_n])


def make_candidate_inputs(
    case: CandidateCase, record: IndexFormat, index: IndexSpec, generator: torch.Generator
) -> CandidateInputs:
    """Inputs of a case, on the generator's device; lists of strided cases have gaps."""
    paged = make_inputs(case.call, record, index, generator)
    call, size = case.call, case.block_size
    limits = limits_reference(paged.context_lens, call.batch, call.next_n, call.width).flatten()
    rows = [_list(case, -(-int(limit) // size), generator) for limit in limits.tolist()]
    wide = torch.full((call.rows, case.slots + 3 * call.strided), 5, dtype=torch.int32, device=generator.device)
    blocks = wide[:, : case.slots]
    blocks.copy_(torch.stack(rows))
    return CandidateInputs(paged, blocks)


def _list(case: CandidateCase, seen: int, generator: torch.Generator) -> Tensor:
    """int32 [slots] of a token that sees keys of so many blocks."""
    device, slots = generator.device, case.slots
    found = torch.full((slots,), -1, dtype=torch.int32, device=device)
    if case.lists is Lists.EMPTY:
        return found
    if case.lists is Lists.WILD:
        found = torch.randint(-2, seen + 5, (slots,), device=device, generator=generator, dtype=torch.int32)
        odd = torch.tensor((-(2**31), 2**31 - 1, 1 << 28, 1 << 29, -7), dtype=torch.int32, device=device)
        found[::3] = odd.repeat(slots)[: len(found[::3])]
        return found
    chosen = torch.randperm(seen, device=device, generator=generator)[:slots].to(torch.int32)
    if case.lists is Lists.SORTED:
        found[: len(chosen)] = chosen.sort().values
        return found
    # The newest is among them, at least one slot has none, and the rest is anywhere.
    chosen = chosen[: max(1, slots - 2)]
    if seen and seen - 1 not in chosen:
        chosen[0] = seen - 1
    places = torch.randperm(slots, device=device, generator=generator)[: len(chosen)]
    found[places] = chosen
    return found


class CandidateKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def indexer_logits_candidates(  # noqa: D102
        self,
        q: Tensor,
        k_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        candidate_blocks: Tensor,
        **options: Any,
    ) -> Tensor: ...


@dataclass(frozen=True)
class CandidateRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: CandidateCase
    kernels: Callable[[CandidateCase], CandidateKernels]
    device: torch.device
    seed: int
    form = "candidates"

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

    def inputs(self, kernels: CandidateKernels, variation: int = 0) -> CandidateInputs:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        index = kernels.spec.index
        assert index is not None, "a spec with the op has an index"
        return make_candidate_inputs(self.case, index_format(index.keys), index, generator)

    def outputs(self, kernels: CandidateKernels) -> GuardedTensor:
        """Poisoned scores between guard zones."""
        case, dtype = self.case, SCORE_DTYPES[str(kernels.spec.scores)]
        return GuardedTensor.outputs((case.call.rows, case.columns), dtype, self.device, case.call.strided)

    def call(self, kernels: CandidateKernels, inputs: CandidateInputs, out: Tensor) -> None:
        """Run the op on the current stream."""
        options: dict[str, Any] = {"block_size": self.case.block_size, **inputs.paged.named}
        tensors: Any = inputs.tensors
        found = kernels.indexer_logits_candidates(*tensors, out=out, **options)
        if found.data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")

    def compare(self, kernels: CandidateKernels, inputs: CandidateInputs, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or a write outside of them."""
        index = kernels.spec.index
        assert index is not None
        record, found = index_format(index.keys), outputs.view
        want = self._reference(inputs, record)
        if is_exact(self.case.call.contents):
            bad = differs_exactly(found, want)
        else:
            sized = replace(inputs, paged=with_magnitudes(record, inputs.paged))
            bad = differs_more(found, want, self._reference(sized, record))
        require_none("scores", found, bad, want)
        # Last, since it poisons what was written.
        written = outputs.written_outside()
        if written:
            raise WrongResultError(f"{written} elements outside of the scores were written")

    def _reference(self, inputs: CandidateInputs, record: IndexFormat) -> Tensor:
        given: Any = (*inputs.tensors, record, self.case.block_size)
        return candidates_reference(*given, q_scales=inputs.paged.q_scales)

    def _plain(self, kernels: CandidateKernels) -> tuple[CandidateInputs, GuardedTensor]:
        inputs, outputs = self.inputs(kernels), self.outputs(kernels)
        self.call(kernels, inputs, outputs.view)
        kept = outputs.view.clone()
        self.compare(kernels, inputs, outputs)
        outputs.view.copy_(kept)
        return inputs, outputs

    def _alone(self, kernels: CandidateKernels) -> None:
        inputs, outputs = self._plain(kernels)
        next_n = self.case.call.next_n
        for request in range(self.case.call.batch):
            one = self.outputs(kernels)
            rows = slice(request * next_n, (request + 1) * next_n)
            self.call(kernels, inputs.request(request), one.view[rows])
            require_same_bits(f"request {request} by itself", one.view[rows], outputs.view[rows])
