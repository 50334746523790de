"""Running one case of the logits with scores of candidate blocks: these are held to the scores that were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dsagen.check.block_cases import BlockCase
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs
from dsagen.check.indexer_run import LogitsRun, requests_of
from dsagen.check.outputs import GuardedTensor
from dsagen.check.probes import WrongResultError
from dsagen.check.scores_run import ScoresRun, differs_exactly, require_none
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.families.indexer_logits.reference import block_scores_reference, limits_reference
from dsagen.index_format import IndexFormat
from dsagen.spec import DeploymentSpec, IndexSpec


class BlockKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def indexer_logits_blocks(  # noqa: D102
        self, q: Tensor, k_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class BlockRun(ScoresRun[BlockCase, BlockKernels, LogitsInputs]):
    """One case with scores of blocks. `blocks` holds the poisoned outputs for them, by tokens of a call."""

    form: ClassVar[str] = "blocks"
    blocks: dict[int, tuple[GuardedTensor, GuardedTensor]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and the width of a row."""
        return self.case.call.rows, self.case.call.width

    @property
    def strided(self) -> bool:
        """As the case says."""
        return self.case.call.strided

    def draw(self, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> LogitsInputs:
        """Inputs of the case."""
        return make_inputs(self.case.call, record, index, generator)

    def invoke(self, kernels: BlockKernels, inputs: LogitsInputs, out: Tensor) -> Tensor:
        """Run the op on the current stream, with scores of blocks poisoned before."""
        tokens, call = out.shape[0], self.case.call
        if tokens not in self.blocks:
            columns = -(-call.width // BLOCK_KEYS)
            self.blocks[tokens] = (
                GuardedTensor.outputs((tokens, columns), out.dtype, self.device, self.strided),
                # Counts have no dtype of their own here: as many bytes as fp32.
                GuardedTensor.outputs((tokens,), torch.float32, self.device, strided=False),
            )
        scores, counts = self.blocks[tokens]
        scores.poison_again()
        counts.poison_again()
        given: dict[str, Any] = {"out": out, "block_scores": scores.view, "block_counts": counts.view.view(torch.int32)}
        options: dict[str, Any] = {"unscored_up_to": call.unscored, "fill_neg_inf": call.fill, **inputs.named}
        q, k_cache, weights, lens, table = inputs.tensors
        found = kernels.indexer_logits_blocks(q, k_cache, weights, lens, table, **given, **options)
        if [tensor.data_ptr() for tensor in found] != [tensor.data_ptr() for tensor in given.values()]:
            raise WrongResultError("the op did not return the outputs that it was given")
        return found[0]

    def compare_scores(self, inputs: LogitsInputs, record: IndexFormat, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score, of a key or a block, that is wrong or was not to be written."""
        LogitsRun(self.case.call, self._never, self.device, self.seed).compare_scores(inputs, record, outputs)
        call = self.case.call
        scores, counts = self.blocks[outputs.view.shape[0]]
        most = min(call.width, inputs.block_table.shape[1] * call.page_size)
        limits = limits_reference(inputs.context_lens, call.batch, call.next_n, most).flatten()
        # The largest of rounded scores is the largest rounded.
        want, seen = block_scores_reference(outputs.view.double(), limits, BLOCK_KEYS)
        require_none("block_counts", counts.view.view(torch.int32)[:, None], _differs(counts.view, seen), seen[:, None])
        scored = torch.where(limits <= call.unscored, 0, seen)
        inside = torch.arange(want.shape[1], device=self.device) < scored[:, None]
        found = scores.view
        require_none("block_scores", found, inside & differs_exactly(found, want), want)
        untouched = found.view(scores.whole.dtype) == scores.poison
        require_none("block_scores that nothing should write", found, ~inside & ~untouched, want)
        outside = scores.written_outside() + counts.written_outside()
        if outside:
            raise WrongResultError(f"{outside} elements outside of the blocks' outputs were written")

    @staticmethod
    def _never(_: object) -> Any:
        raise AssertionError("a comparison loads no kernels")

    def parts(self, inputs: LogitsInputs) -> Iterator[tuple[str, slice, LogitsInputs]]:
        """The requests."""
        return requests_of(self.case.call, inputs)


def _differs(counts: Tensor, seen: Tensor) -> Tensor:
    return (counts.view(torch.int32) != seen)[:, None]
