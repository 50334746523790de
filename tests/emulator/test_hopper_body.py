"""The hopper body of sparse decode, as nvcc emits it: right for every encoding, in every order of warps.

What the mutants of mma_sync show of the parts that both bodies share holds for this one too; those of its own products,
fences and probabilities are tried here.
"""

from __future__ import annotations

from dataclasses import replace

import decode
import pytest
import torch

from dsagen.check.cases import DecodeCase, ExtraCase, Ids, Lengths, Values
from dsagen.errors import EmulatorError

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


# As many splits as two rounds of loads, with one that has no token; more units of heads and dims than warps.
JOINED = (
    ("v32", 16, 2, replace(CASE, batch=2, topk=300)),
    ("v4", 24, 5, CASE),
    ("v32", 8, 19, replace(CASE, topk=1216, lengths=Lengths.PER_REQUEST)),
)


@pytest.mark.parametrize(("fmt", "heads", "splits", "case"), JOINED)
def test_one_launch_gives_the_bits_of_two(fmt: str, heads: int, splits: int, case: DecodeCase) -> None:
    main = decode.main_kernel(fmt, heads, ARCH, "hopper")
    two = decode.run(case, fmt, heads, ARCH, splits=splits, main=main)
    one = decode.run(case, fmt, heads, ARCH, splits=splits, main=main, joins=True, seed=7)
    assert decode.problem(case, fmt, one) == ""
    assert one.out.view(-1).view(torch.int16).equal(two.out.view(-1).view(torch.int16))
    assert one.lse.equal(two.lse)


def test_rows_without_a_token_in_one_launch() -> None:
    case = replace(CASE, topk=250, ids=Ids.ALL_INVALID)
    main = decode.main_kernel("v32", 16, ARCH, "hopper")
    found = decode.run(case, "v32", 16, ARCH, splits=3, main=main, joins=True)
    assert decode.problem(case, "v32", found) == ""


def test_splits_that_are_not_all_resident_stand_still() -> None:
    """What a cooperative launch is for: the driver refuses such a grid."""
    main = decode.main_kernel("v32", 16, ARCH, "hopper")
    with pytest.raises(EmulatorError, match="wait for more need resident=3"):
        decode.run(replace(CASE, topk=250), "v32", 16, ARCH, splits=3, main=main, joins=True, resident=2)
