"""Running one case of the logits in candidate blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dsagen.check.candidate_cases import CandidateCase, Lists
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs, whole_storage
from dsagen.check.indexer_run import requests_of, with_magnitudes
from dsagen.check.outputs import GuardedTensor
from dsagen.check.scores_run import ScoresRun, differs_exactly, differs_more, is_exact, require_none
from dsagen.families.indexer_logits.reference import candidates_reference, limits_reference
from dsagen.index_format import IndexFormat
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
class CandidateRun(ScoresRun[CandidateCase, CandidateKernels, CandidateInputs]):
    """One case with keys in candidate blocks."""

    form: ClassVar[str] = "candidates"

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens, and keys of a list of blocks."""
        return self.case.call.rows, self.case.columns

    @property
    def strided(self) -> bool:
        """As the case says."""
        return self.case.call.strided

    def draw(self, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> CandidateInputs:
        """Inputs of the case."""
        return make_candidate_inputs(self.case, record, index, generator)

    def invoke(self, kernels: CandidateKernels, inputs: CandidateInputs, out: Tensor) -> Tensor:
        """Run the op on the current stream."""
        options: dict[str, Any] = {"block_size": self.case.block_size, **inputs.paged.named}
        tensors: Any = inputs.tensors
        return kernels.indexer_logits_candidates(*tensors, out=out, **options)

    def compare_scores(self, inputs: CandidateInputs, record: IndexFormat, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference: every column is written."""
        found, want = outputs.view, self._reference(inputs, record)
        if is_exact(self.case.call.contents):
            bad = differs_exactly(found, want)
        else:
            sized = replace(inputs, paged=with_magnitudes(record, inputs.paged))
            bad = differs_more(found, want, self._reference(sized, record))
        require_none("scores", found, bad, want)

    def parts(self, inputs: CandidateInputs) -> Iterator[tuple[str, slice, CandidateInputs]]:
        """The requests."""
        return requests_of(self.case.call, inputs)

    def _reference(self, inputs: CandidateInputs, record: IndexFormat) -> Tensor:
        given: Any = (*inputs.tensors, record, self.case.block_size)
        return candidates_reference(*given, q_scales=inputs.paged.q_scales)
