"""Inputs of conformance cases of top-k: scores, windows and tables, with poison around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsagen.check.topk_cases import FAR_ROW_ELEMENTS, Ids, Scores, TopkCase, Windows
from dsagen.families.topk.op import CANDIDATE_BLOCK

_TABLE_GAP = 3  # columns behind each row of a page table


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


def make_inputs(case: TopkCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> TopkInputs:
    """Random inputs of a case. Everything outside of the windows is NaN and +inf, outside of the rows NaN."""
    windows = _windows(case, device, generator)
    stride = FAR_ROW_ELEMENTS if case.far else case.width + case.gap
    elements = case.misaligned + (case.rows - 1) * stride + case.width + case.gap
    # A far row's gap is too large to be filled.
    buffer = torch.empty(elements, dtype=dtype, device=device)
    if not case.far:
        buffer.fill_(torch.nan)
    scores = buffer.as_strided((case.rows, case.width), (stride, 1), case.misaligned)
    scores.copy_(_scores(case, dtype, device, generator))
    poison_outside(scores, windows)
    if case.windows is Windows.SHORT:
        scores.fill_(torch.nan)
    return TopkInputs(scores, windows, _transform(case, device, generator))


def poison_outside(scores: Tensor, windows: dict[str, Tensor]) -> None:
    """Write NaN and +inf in turn to what is in no window."""
    if not windows:
        return
    column = torch.arange(scores.shape[1], device=scores.device)
    first = windows["starts"] if "starts" in windows else torch.zeros_like(windows["lengths"])
    outside = (column < first[:, None]) | (column >= (first + windows["lengths"])[:, None])
    poison = torch.where(column % 2 == 0, torch.nan, torch.inf).to(scores.dtype)
    scores.copy_(torch.where(outside, poison, scores))


def _windows(case: TopkCase, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    if case.windows is Windows.WHOLE:
        return {}

    def draw(most: int) -> Tensor:
        return torch.randint(0, most + 1, (case.rows,), device=device, generator=generator, dtype=torch.int32)

    if case.windows is Windows.SHORT:
        lengths = draw(min(case.k, case.width))
        lengths[: min(3, case.rows)] = torch.tensor([min(case.k, case.width), 0, -5], device=device)[: case.rows]
        return {"lengths": lengths}
    lengths = draw(case.width)
    special = torch.tensor([case.width, 0, case.k - 1, case.k, case.k + 1, -3, 1], dtype=torch.int32, device=device)
    special = special[: case.rows].clamp(max=case.width)
    lengths[: len(special)] = special
    if case.windows is Windows.LENGTHS:
        return {"lengths": lengths}
    starts = torch.minimum(draw(case.width), case.width - lengths.clamp(min=0))
    return {"lengths": lengths, "starts": starts.to(torch.int32)}


def from_keys(keys: Tensor, bits: int) -> Tensor:
    """fp32 of int64 keys of 16 or 32 bits, in whose order scores are: the sign's bit is set for positive ones."""
    top = 1 << (bits - 1)
    patterns = torch.where(keys >= top, keys - top, (2 * top - 1) - keys) << (32 - bits)
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)


def _digit_keys(case: TopkCase, bits: int, draw: Callable[[int, int], Tensor]) -> Tensor:
    """int64 keys that differ in one digit only, or in all digits but that one."""
    above, count = case.digit
    low = max(bits - above - count, 0)
    digit = (1 << max(bits - above, 0)) - (1 << low) if above < bits else 0
    varies = digit if case.scores is Scores.ONE_DIGIT else ((1 << bits) - 1) ^ digit
    # 1.1338, or its upper half: a positive number like any other.
    return (0xBF912345 >> (32 - bits)) & ~varies | draw(0, 1 << bits) & varies


def _scores(case: TopkCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
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
        case Scores.LOW_14_BITS:
            return from_bits(0x3F800000 + integers(0, 1 << 14))
        case Scores.LOW_21_BITS:
            return from_bits(0x3F800000 + integers(0, 1 << 21))
        case Scores.ONE_DIGIT | Scores.OTHER_DIGITS:
            key_bits = dtype.itemsize * 8
            return from_keys(_digit_keys(case, key_bits, integers), key_bits)
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
        case Scores.FEW_ABOVE_TIES:
            rank = torch.rand(shape, device=device, generator=generator).argsort(-1)
            return torch.where(rank < 500, 2 + normal().abs(), torch.where(rank < case.width // 2, 1.0, 0.0))
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
        case Scores.ALL_POS_INF:
            return torch.full(shape, torch.inf, device=device)
        case Scores.NEG_INF_TAIL:
            return normal().masked_fill(column >= case.width // 40, -torch.inf)
        case Scores.INFINITIES:
            return choose(torch.inf, -torch.inf, -torch.inf, -torch.inf, 1.0, torch.nan)


def _transform(case: TopkCase, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator, dtype=torch.int32)

    def padded(low: int, high: int, rows: int, columns: int) -> Tensor:
        """A table in rows of an odd stride."""
        return draw(low, high, rows, columns + _TABLE_GAP)[:, :columns]

    pages = case.width // case.page_size + 3
    match case.ids:
        case Ids.LOGICAL:
            return {}
        case Ids.OFFSET:
            return {"offsets": draw(0, 1 << 30, case.rows)}
        case Ids.BLOCKS:
            return {"candidate_blocks": padded(0, 1 << 27, case.rows, case.width // CANDIDATE_BLOCK + 1)}
        case Ids.PAGED:
            return {
                "page_table": padded(-2, (1 << 31) // case.page_size - 1, case.rows, pages),
                "page_size": case.page_size,
            }
        case Ids.MAPPED:
            # Some rows have no table, some windows run past the last page.
            return {
                "page_table": padded(0, 1 << 20, 7, pages),
                "page_size": case.page_size,
                "table_of_row": draw(-1, 8, case.rows),
                "table_starts": draw(0, 6, case.rows),
            }
