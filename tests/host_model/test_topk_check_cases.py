"""The check's quick cases of top-k on the host model, in rows that it can run, by every body."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from host import COMPILER
from topk_case import HELD, SHARED, SMALL, Block, Call, Pages, Resident, Split, Stream, check

from dsagen.check.topk_cases import Probe, Scores, TopkCase, Windows, topk_cases
from dsagen.check.topk_inputs import make_inputs
from dsagen.families.topk.op import CANDIDATE_BLOCK

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

ROWS, WIDTH, SLOTS = 3, 700, 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Layouts and probes that differ in what a device does between calls, not in what a call is given.
CASES = [case for case in topk_cases("quick") if case.probe is Probe.PLAIN and case.width and case.k > 1]


# Lists of 64 elements, which none of the cases' slots fit, and lists that most rows' candidates fit.
BLOCKS: dict[str, Block] = {
    "swept": SMALL,
    "swept, ample list": Stream(elements=512),
    "held": HELD,
    "held, ample list": Resident(elements=512),
    "shared": SHARED,
    "shared, ample list": Split(elements=512),
}


def shrunk(case: TopkCase) -> TopkCase:
    return replace(
        case, rows=min(case.rows, ROWS), width=min(case.width, WIDTH + case.misaligned), k=min(case.k, SLOTS)
    )


def numbers(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.tolist())


def call_of(case: TopkCase, score: str, block: Block) -> Call:
    inputs = make_inputs(case, DTYPES[score], torch.device("cpu"), torch.Generator().manual_seed(7))
    moved, pages = inputs.transform, None
    if "candidate_blocks" in moved:
        pages = Pages(CANDIDATE_BLOCK, moved["candidate_blocks"].numpy())
    elif "page_table" in moved:
        rows, starts = numbers(moved.get("table_of_row")), numbers(moved.get("table_starts"))
        pages = Pages(case.page_size, moved["page_table"].numpy(), rows, starts)
    return Call(
        np.ascontiguousarray(inputs.scores.float().numpy()),
        case.k,
        score,
        lengths=numbers(inputs.windows.get("lengths")),
        starts=numbers(inputs.windows.get("starts")),
        drops_neg_inf=case.drop_neg_inf,
        pages=pages,
        offsets=numbers(moved.get("offsets")),
        misaligned=case.misaligned,
        block=block,
    )


@pytest.mark.parametrize("score", DTYPES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_case(case: TopkCase, score: str) -> None:
    for block in BLOCKS.values():
        check(call_of(shrunk(case), score, block))


def test_the_cases_are_of_every_kind() -> None:
    assert {case.scores for case in CASES} == set(Scores) and {case.windows for case in CASES} == set(Windows)
    assert len({case.ids for case in CASES}) == 5 and len({case.page_size for case in CASES}) >= 7
