"""Scores that are counted where they are made, as nvcc emits both bodies: what is counted is what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from indexer import EmulatedCounts, counted_kernel, problem, spec_of
from planted import faulty

from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.families.indexer_logits.op import most_counted
from dsagen.families.indexer_logits.reference import counts_reference

pytestmark = pytest.mark.compile

# Rings that go round, and blocks that begin and end within rows; table entries that name no page, whose keys are -inf;
# tiles of few keys; more requests than a warp has lanes.
LONG = LogitsCase("long", 2, 1, 1500, page_size=61, pad_bytes=12, lengths=Lengths.PER_REQUEST, fill=True)
WILD = LogitsCase("wild", 3, 1, 700, page_size=64, pad_bytes=16, lengths=Lengths.PER_TOKEN, unscored=300, wild=True)
FEW = LogitsCase("few", 2, 1, 90, page_size=32, lengths=Lengths.BEYOND)
MANY = LogitsCase("many", 140, 1, 130, page_size=5, lengths=Lengths.BEYOND, unscored=40)
CASES = (LONG, WILD, FEW, MANY)


def counting(body: str, seed: int = 0, sms: int = 1, before: int = 0, **of: str | int) -> EmulatedCounts:
    arch, heads, dim = str(of.pop("arch", "sm_90a")), int(of.pop("heads", 16)), int(of.pop("dim", 128))
    scores, keys = str(of.pop("scores", "fp32")), str(of.pop("keys", "fp8"))
    kernel = counted_kernel(body, arch, heads, dim, scores, keys)
    spec, schedule = spec_of(arch, heads, dim, scores, keys), "random" if seed else None
    return EmulatedCounts(spec, kernel, seed, schedule, sms, before=before)


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
@pytest.mark.parametrize("body", ["hopper", "mma_sync"])
def test_what_is_written_is_counted(body: str, scores: str) -> None:
    for seed, case in enumerate(CASES):
        assert problem(case, counting(body, seed, 1 + seed % 2, before=seed, scores=scores)) == "", case


@pytest.mark.parametrize("body", ["hopper", "mma_sync"])
def test_nan_and_infinities_have_digits_of_their_own(body: str) -> None:
    special = replace(WILD, contents=Contents.SPECIAL)
    for case in (special, replace(LONG, contents=Contents.NAN_KEYS), replace(LONG, contents=Contents.NORMAL)):
        # Sums of e4m3 products are short.
        assert problem(replace(case, short_sums=body == "hopper"), counting(body, 3)) == "", case


@pytest.mark.parametrize(("heads", "keys"), [(16, "fp8"), (64, "fp8"), (40, "mxfp4")])
def test_tokens_of_a_request_have_counts_of_their_own(heads: int, keys: str) -> None:
    subject = counting("hopper", 5, 2, heads=heads, keys=keys)
    most = most_counted(subject.kernel.plan)
    assert most > 1
    case = LogitsCase("tokens", 2, most, 600, page_size=64, lengths=Lengths.PER_TOKEN, unscored=100)
    assert problem(case, subject) == ""


def test_blocks_count_apart_from_the_grid_before() -> None:
    assert problem(WILD, replace(counting("hopper"), written_before=("histograms",))) == ""


def test_a_digit_is_that_of_the_order_of_scores() -> None:
    """Of more than one binade, with a NaN, both zeros and both infinities, in the words of the definition."""
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[nan, -inf, -3.0e38, -2.0, -1.0e-40, -0.0, 0.0, 1.0e-40, 2.0, 2.1, 2.6, 3.0e38, inf, 9.0]])
    counts = counts_reference(scores, torch.tensor([13]), 0)[0]
    assert counts.nonzero().flatten().tolist() == [0, 4, 5, 512, 1024, 1025, 1537, 1538, 2044, 2045]
    assert counts[[0, 1024, 1025, 1537, 1538]].tolist() == [1, 1, 3, 2, 1]
    assert int(counts_reference(scores, torch.tensor([13]), 13).sum()) == 0


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # What a unit has counted is counted again with the next one's.
        ("        ptx::store_shared_4(at, 0);\n", ""),
        # Keys behind the window are counted, too.
        ("if (key < keys) count_score<C>", "if (key != kNoKey) count_score<C>"),
    ],
    ids=["clear", "window"],
)
def test_a_fault_in_counting_is_noticed(text: str, wrong: str) -> None:
    subject = counting("hopper")
    found = problem(LONG, replace(subject, kernel=faulty(subject.kernel, text, wrong)))
    assert found.startswith("histograms["), found
