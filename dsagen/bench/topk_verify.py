"""Whether a selection is right: torch's values as a multiset for any, the sorted reference for the promises."""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.bench.topk_data import TopkBenchCase
from dsagen.families.topk.reference import topk_reference

# Rows of a case whose order and equals are compared with the sorted reference.
SORTED_ROWS = 32


def selection_problem(case: TopkBenchCase, scores: Tensor, indices: Tensor) -> str:
    """What is wrong with logical `indices` [rows, k] as a selection from `scores`; empty when nothing is.

    Compares values with torch.topk's; -1 counts as out of range.
    """
    if tuple(indices.shape) != (case.rows, case.k):
        return f"the result has shape {tuple(indices.shape)}, expected {(case.rows, case.k)}"
    indices = indices.long()
    outside = (indices < 0) | (indices >= case.width)
    if bool(outside.any()):
        row, slot = outside.nonzero()[0].tolist()
        return f"slot {slot} of row {row} is no index: {int(indices[row, slot])}; {int(outside.sum())} slots are none"
    ordered = indices.sort(-1).values
    twice = ordered[:, 1:] == ordered[:, :-1]
    if bool(twice.any()):
        row, slot = twice.nonzero()[0].tolist()
        return f"row {row} has index {int(ordered[row, slot])} twice; {int(twice.sum())} slots repeat another"
    got = scores.gather(1, indices).float().sort(-1).values
    want = torch.topk(scores, case.k, dim=-1, sorted=False).values.float().sort(-1).values
    if not torch.equal(got, want):
        row = int((got != want).any(-1).nonzero()[0])
        return f"row {row} does not hold torch.topk's values; {int((got != want).sum())} slots differ"
    return ""


def promise_problem(case: TopkBenchCase, scores: Tensor, indices: Tensor) -> str:
    """What of its mode a selection breaks, on some of the rows; empty when nothing."""
    if case.mode == "off":
        return ""
    rows = torch.arange(0, case.rows, max(1, case.rows // SORTED_ROWS), device=scores.device)
    want, _ = topk_reference(scores[rows], case.k)
    found = indices[rows].long()
    if case.mode == "set":
        found = found.sort(-1).values
    different = found != want
    if not bool(different.any()):
        return ""
    row, slot = different.nonzero()[0].tolist()
    return (
        f"mode {case.mode}: row {int(rows[row])} has {int(found[row, slot])} where the sorted reference has "
        f"{int(want[row, slot])}; {int(different.sum())} slots differ"
    )
