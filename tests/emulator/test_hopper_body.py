"""The hopper body of sparse decode, as nvcc emits it: right for every encoding, in every order of warps.

What the mutants of mma_sync show of the parts that both bodies share holds for this one too; those of its own products,
fences and probabilities are tried here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import decode
import pytest
import torch

from dsagen.check.cases import DecodeCase, ExtraCase, Ids, Lengths, Values
from dsagen.plan import round_up

pytestmark = pytest.mark.compile

ARCH = "sm_90a"
# The ring goes round; ids of all kinds; the last tile has tokens in its first stage only.
CASE = DecodeCase("hopper", batch=1, s_q=1, kv_tokens=700, topk=600, page_size=61, wild_ids=True, sink=True)
FORMATS = {
    "v32": 16, "v32_nope": 8, "v4": 16, "v41_interleaved": 16, "v41_page_split": 24, "v41_fp4_interleaved": 16,
    "bf16": 8, "fp16": 8,
}  # fmt: skip


@pytest.mark.parametrize(("fmt", "heads"), FORMATS.items())
@pytest.mark.parametrize("values", [Values.RAMP_UP, Values.HUGE], ids=["ramp_up", "huge"])
def test_it_is_held_to_the_reference(fmt: str, heads: int, values: Values) -> None:
    case = replace(CASE, values=values)
    main = decode.main_kernel(fmt, heads, ARCH, "hopper")
    found = decode.run(case, fmt, heads, ARCH, splits=1 if values is Values.HUGE else 2, main=main)
    assert decode.problem(case, fmt, found) == ""


def test_what_has_no_valid_token_is_skipped() -> None:
    """Three tiles without one, then a tile with one in its second stage."""
    case = replace(CASE, topk=250, ids=Ids.LAST_VALID)
    found = decode.run(case, "v32", 16, ARCH, main=decode.main_kernel("v32", 16, ARCH, "hopper"))
    assert decode.problem(case, "v32", found) == ""


@pytest.mark.parametrize("extra", ["v41_interleaved", "v41_fp4_interleaved"])
def test_second_caches(extra: str) -> None:
    case = replace(CASE, topk=150, extra=ExtraCase(kv_tokens=300, topk=394, page_size=13))
    main = decode.main_kernel("v41_interleaved", 16, ARCH, "hopper", extra)
    found = decode.run(case, "v41_interleaved", 16, ARCH, main=main, extra=extra)
    assert decode.problem(case, "v41_interleaved", found, extra) == ""


@pytest.mark.parametrize("schedule", ["random", "priorities"])
def test_results_do_not_depend_on_the_schedule(schedule: str) -> None:
    case = replace(CASE, lengths=Lengths.PER_REQUEST, strided=True, padded_pages=True)
    main = decode.main_kernel("v32", 16, ARCH, "hopper")
    first = decode.run(case, "v32", 16, ARCH, main=main)
    for seed in range(1, 4):
        again = decode.run(case, "v32", 16, ARCH, seed=seed, schedule=schedule, main=main)
        assert first.out.view(-1).equal(again.out.view(-1))
        assert first.lse.equal(again.lse)


# Of units of heads and dims a warp has one or several, of one head or of two, or none; splits without a token.
JOINED = (
    ("v32", 16, 2, replace(CASE, batch=2, topk=300)),
    ("v41_interleaved", 32, 2, replace(CASE, topk=300)),
    ("v4", 24, 4, replace(CASE, batch=2, sink=False)),
    ("v32", 16, 8, replace(CASE, topk=512, lengths=Lengths.PER_REQUEST)),
    ("v32", 5, 8, replace(CASE, topk=512)),
)


@pytest.mark.parametrize(("fmt", "heads", "splits", "case"), JOINED)
def test_one_launch_gives_the_bits_of_two(fmt: str, heads: int, splits: int, case: DecodeCase) -> None:
    main = decode.main_kernel(fmt, round_up(heads, 8), ARCH, "hopper")
    two = decode.run(case, fmt, heads, ARCH, splits=splits, main=main)
    one = decode.run(case, fmt, heads, ARCH, splits=splits, main=main, joins=True, seed=7)
    assert decode.problem(case, fmt, one) == ""
    assert one.out.view(-1).view(torch.int16).equal(two.out.view(-1).view(torch.int16))
    assert one.lse.equal(two.lse)


def test_a_split_of_no_weight_is_no_part_of_one_launch() -> None:
    """Its scores are all -inf, and its sums NaN."""
    case = DecodeCase("no weight", batch=1, s_q=1, kv_tokens=128, topk=128, page_size=64)
    inputs = decode.inputs_of(case, "bf16", 8, None)  # those that a run takes
    inputs.indices[:] = torch.arange(128, dtype=torch.int32)
    rows = inputs.caches["k_cache"].view(-1, 576)
    rows[:] = 0.5
    rows[64:, 5] = math.inf
    inputs.q[..., 5] = -1.0
    main = decode.main_kernel("bf16", 8, ARCH, "hopper")
    two, one = (decode.run(case, "bf16", 8, ARCH, splits=2, main=main, joins=joins) for joins in (False, True))
    assert one.out.isfinite().all() and one.lse.isfinite().all()
    assert one.out.equal(two.out) and one.lse.equal(two.lse)


def test_rows_without_a_token_in_one_launch() -> None:
    case = replace(CASE, topk=250, ids=Ids.ALL_INVALID)
    main = decode.main_kernel("v32", 16, ARCH, "hopper")
    found = decode.run(case, "v32", 16, ARCH, splits=4, main=main, joins=True)
    assert decode.problem(case, "v32", found) == ""
