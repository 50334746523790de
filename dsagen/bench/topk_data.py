"""Cases and inputs of top-k benchmarks: normal scores in whole rows, ids through a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.check.topk_calls import MODES
from dsagen.errors import SpecError

TORCH_SCORES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TopkBenchCase:
    """One shape: the `k` largest of `width` scores in each of `rows` rows, as ids of pages of `page_size`.

    `mode` is what is promised: `off`: some k that no other exceeds; `set`: among equals the lower indices; `order`:
    these, ascending. Raises SpecError for a shape that cannot be drawn.
    """

    score: str
    rows: int
    width: int
    k: int
    mode: str
    page_size: int = 64

    def __post_init__(self) -> None:
        if self.score not in TORCH_SCORES:
            raise SpecError(f"score {self.score!r}: benchmark data exists for {', '.join(TORCH_SCORES)}")
        if self.mode not in MODES:
            raise SpecError(f"mode {self.mode!r}: must be one of {', '.join(MODES)}")
        for name in ("rows", "width", "k", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}")
        if self.k > self.width:
            raise SpecError(f"k {self.k} > width {self.width}: rows would be taken whole; use k <= {self.width}")
        if self.width % self.page_size:
            raise SpecError(f"width {self.width} does not fill pages of {self.page_size}: use a multiple")

    @property
    def dtype(self) -> torch.dtype:
        """The scores' dtype."""
        return TORCH_SCORES[self.score]

    @property
    def read_bytes(self) -> int:
        """Bytes of the scores of one call, each read once."""
        return self.rows * self.width * self.dtype.itemsize

    @property
    def write_bytes(self) -> int:
        """Bytes of the ids of one call."""
        return self.rows * self.k * 4

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return self.width // self.page_size


@dataclass(frozen=True)
class TopkBenchInputs:
    """One input set: `scores` [rows, width]; `lengths` int32 [rows], all the width; `page_table` int32 [rows, pages].

    Lengths and table are shared by all sets. Every row has the same pages, in random order.
    """

    scores: Tensor
    lengths: Tensor
    page_table: Tensor


def topk_inputs(
    case: TopkBenchCase, sets: int, *, device: str | torch.device = "cuda", seed: int = 0
) -> list[TopkBenchInputs]:
    """`sets` input sets of a case, with scores of their own."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    lengths = torch.full((case.rows,), case.width, dtype=torch.int32, device=device)
    order = torch.randperm(case.pages, device=device, generator=generator).to(torch.int32)
    table = order.repeat(case.rows, 1)
    return [
        TopkBenchInputs(
            torch.randn(case.rows, case.width, device=device, generator=generator).to(case.dtype), lengths, table
        )
        for _ in range(sets)
    ]


def logical_ids(case: TopkBenchCase, item: TopkBenchInputs, ids: Tensor) -> Tensor:
    """int64 [rows, k] indices that paged ids stand for; -1 for ids that no page of the row has."""
    page_of = torch.empty(case.pages, dtype=torch.int64, device=ids.device)
    page_of[item.page_table[0].long()] = torch.arange(case.pages, device=ids.device)
    page = torch.div(ids.long(), case.page_size, rounding_mode="floor")
    inside = (page >= 0) & (page < case.pages)
    found = page_of[page.clamp(0, case.pages - 1)] * case.page_size + ids.long() % case.page_size
    return torch.where(inside, found, -1)
