"""V4.1's second level in decode steps: candidate blocks that one layer chooses, and later ones score alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dsagen.errors import GuardError
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.runtime.driver import Driver
from dsagen.runtime.indexer_blocks import block_columns
from dsagen.runtime.step_plan import ALIGNMENT_BYTES, StepShape, step_workspace
from dsagen.runtime.tensors import TensorRule, require, require_device, require_plain
from dsagen.runtime.topk_plan import TopkPlan

# What a layer does with candidate blocks: it scores all keys and chooses them, or scores those that were chosen.
CHOOSE, USE = "choose", "use"


@dataclass
class CandidateLevel:
    """What layers of a step share of candidate blocks; rows are query tokens, and `slots` how many each may have.

    `block_scores` [rows, blocks] and `block_counts` int32 [rows] are what they are chosen by. `blocks` int32 [rows,
    slots] are their numbers in the order of keys, then -1; `pages` the same as pages of 8 rows of the KV cache,
    which has pages of `page_size` tokens where they were chosen.
    `compact` [rows, 8 x slots] are the scores of their keys. `choosing` and `inside` are top-k's plans for blocks and
    for keys; all but these lie in `memory`.
    """

    memory: torch.Tensor
    slots: int
    block_scores: torch.Tensor
    block_counts: torch.Tensor
    blocks: torch.Tensor
    pages: torch.Tensor
    compact: torch.Tensor
    choosing: TopkPlan
    inside: TopkPlan
    is_chosen: bool = False
    page_size: int | None = None

    def poison(self, chooses: bool) -> None:
        """What a layer is about to write becomes all ones, as that of the step's plan does: NaN, and -1."""
        written = self.memory if chooses else self.compact.view(torch.uint8)
        written.fill_(255)

    def rebind(self) -> None:
        """As that of the step's plan."""
        self.choosing.rebind()
        self.inside.rebind()


def make_level(
    driver: Driver, ordinal: int, shape: StepShape, slots: int, dtype: torch.dtype, plans: tuple[TopkPlan, TopkPlan]
) -> CandidateLevel:
    """The level of a plan, in memory of its own."""
    rows, columns = shape.rows, block_columns(shape.max_seq_len)
    # Rows begin where top-k reads fastest.
    stride = -(-columns // BLOCK_KEYS) * BLOCK_KEYS
    sizes = (
        rows * stride * dtype.itemsize,
        rows * slots * BLOCK_KEYS * dtype.itemsize,
        *[4 * rows * slots] * 2,
        4 * rows,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    memory = step_workspace(driver, ordinal, None, offsets[-1])
    scores, compact, blocks, pages, counts = (
        memory[first : first + size].view(of)
        for first, size, of in zip(offsets, sizes, (dtype, dtype, *[torch.int32] * 3), strict=False)
    )
    return CandidateLevel(
        memory,
        slots,
        scores.view(rows, stride)[:, :columns],
        counts,
        blocks.view(rows, slots),
        pages.view(rows, slots),
        compact.view(rows, slots * BLOCK_KEYS),
        *plans,
    )


class StepBlocks(NamedTuple):
    """Candidate blocks in the caller's memory, which a layer chooses or uses; `blocks` and `pages` as of a level."""

    candidates: str
    blocks: torch.Tensor
    pages: torch.Tensor

    def slots(self, rows: int, device: torch.device) -> int:
        """Blocks of a token; GuardError for tensors that are not those of so many tokens on the device of q."""
        slots = None
        for name, tensor in (("blocks", self.blocks), ("pages", self.pages)):
            require_plain(name, tensor)
            require_device(name, tensor, device, "q")
            require(TensorRule(name, ("int32",), "[batch * next_n, slots]", (rows, slots)), tensor)
            slots = int(tensor.shape[1])
        return int(self.blocks.shape[1])

    def level_of(self, level: CandidateLevel | None) -> CandidateLevel:
        """A plan's level with these in the place of its own; GuardError where there are fewer blocks than slots."""
        level = require_level(level, self.candidates)
        if level.slots != self.blocks.shape[1]:
            raise GuardError(
                f"[T-22] blocks: {self.blocks.shape[1]} slots, and rows of max_seq_len keys have {level.slots} blocks: "
                "pass as many as there are at most"
            )
        # Who chose them, and for what pages, is the caller's to know.
        return replace(level, blocks=self.blocks, pages=self.pages, is_chosen=True, page_size=None)


def stray_candidates() -> GuardError:
    """What a call is told that selects nothing."""
    return GuardError("[T-22] candidates: given with reuse_ids, which selects nothing: leave either out")


def require_chosen(level: CandidateLevel) -> None:
    """Refuse the use of blocks that nobody chose."""
    if not level.is_chosen:
        raise GuardError(
            "[T-22] candidates: none were chosen with this plan yet: an earlier layer of the step passes "
            f"candidates={CHOOSE!r}"
        )


def require_level(level: CandidateLevel | None, candidates: object) -> CandidateLevel:
    """The plan's level; GuardError where it has none, or for what a layer cannot do with it."""
    if not isinstance(candidates, str) or candidates not in (CHOOSE, USE):
        raise GuardError(
            f"[T-22] candidates: expected {CHOOSE!r} or {USE!r}, or None for all keys, found {candidates!r}"
        )
    if level is None:
        raise GuardError("[T-22] candidates: the plan has none: pass candidate_blocks to plan_decode_step")
    return level


def require_usable(level: CandidateLevel, candidates: str, page_size: int) -> None:
    """Refuse pages of the KV cache that blocks would lie across, and the use of blocks that nobody chose, or that were
    chosen for pages of another size.
    """
    if page_size % BLOCK_KEYS:
        raise GuardError(
            f"[T-22] candidates: the KV cache has pages of {page_size} tokens, and blocks of {BLOCK_KEYS} would lie "
            f"across them: use pages of a multiple of {BLOCK_KEYS}"
        )
    if candidates != USE:
        return
    require_chosen(level)
    if level.page_size not in (None, page_size):
        raise GuardError(
            f"[T-22] candidates: the KV cache has pages of {page_size} tokens, and the blocks were chosen by a layer "
            f"whose has pages of {level.page_size}: use caches of the same pages, which one table names"
        )
