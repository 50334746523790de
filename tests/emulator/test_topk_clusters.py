"""Rows of top-k that the CTAs of a cluster hold: every way through the kernel, with clusters of every size."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import topk_rows as topk
import torch
from planted import a_race, faulty, said
from topk_rows import Call, Scores, make_call, problem

pytestmark = pytest.mark.compile

ARCH = "sm_90a"
CASES = {
    "lists that fit": Scores(topk.normal),
    "a list that fits after another digit": Scores(topk.one_binade, 26_001, k=2048),
    "equals in a list": Scores(topk.few_values, ordered=False),
    "equals that no list holds": Scores(topk.equal, 26_001),
    "more slots than a list holds": Scores(topk.normal, 26_001, k=8999, drops=True),
    "dropped": Scores(topk.mostly_dropped, drops=True),
    "one digit": Scores(topk.one_digit, 41_001, k=2048, ordered=False),
}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("score", topk.DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_rows_of_a_cluster(case: str, score: str, size: int) -> None:
    call = make_call(replace(CASES[case], cluster=size), score)
    assert problem(call, topk.cluster_kernel(score, ARCH), seed=size) == ""


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("score", topk.DTYPES)
def test_windows_of_fewer_vectors_than_parts(score: str, size: int) -> None:
    # A part may begin behind the last vector, or in it; and one CTA alone is a cluster, too.
    for drops in (False, True):
        call = make_call(Scores(topk.normal, 400, k=3, drops=drops, cluster=size), score)
        call = replace(call, lengths=torch.tensor([36, 33, 7, 4, 18, 1], dtype=torch.int32))
        assert problem(call, topk.cluster_kernel(score, ARCH), seed=size) == ""


# Ways from a guess on: candidates of balanced lists, or of one that is longer; by further digits; and back to the row,
# as too few or too many reach the guess, or there is none.
GUESSED = {
    "balanced lists": (Scores(topk.normal, 40_001, k=2048, ordered=False), "put"),
    "lists in order": (Scores(topk.normal, 40_001, k=2048), "select"),
    "one long list": (Scores(topk.descending, 40_001, k=2048, ordered=False), "gather"),
    "many equals": (Scores(topk.eighths, 40_001, k=2048, ordered=False), "select"),
    "far above": (Scores(topk.far_above, 40_001, ordered=False), "select"),
    "no key like another": (Scores(topk.all_binades, 40_001, k=2048, ordered=False), "put"),
    "too few": (Scores(topk.sampled_above, 40_001, k=2048, ordered=False), "row"),
    "too many": (Scores(topk.sampled_below, 40_001, k=2048, ordered=False), "row"),
    "fewer numbers than sampled ones that are wanted": (
        Scores(topk.mostly_nan, 40_001, ordered=False, drops=True),
        "row",
    ),
}
WAYS = {
    "put": "        candidates.put(t, k, output);\n",
    "gather": "        gather_lists<true>();\n",
    "select": "    list.clear();\n    gather_lists<false>();\n    return list.select(",
    "row": "      // With room for all, everything from the floor on is selected.\n",
}


@pytest.mark.parametrize("score", topk.DTYPES)
@pytest.mark.parametrize("case", GUESSED)
def test_what_becomes_of_a_guess(case: str, score: str) -> None:
    call = make_call(replace(GUESSED[case][0], cluster=4), score)
    assert problem(call, topk.cluster_kernel(score, ARCH), seed=4) == ""


@pytest.mark.parametrize("way", WAYS)
def test_rows_go_the_way_that_they_are_for(way: str) -> None:
    traps = faulty(topk.cluster_kernel("fp32", ARCH), WAYS[way], f'asm volatile("trap;");\n{WAYS[way]}')
    for values, wanted in GUESSED.values():
        if wanted == way:
            assert "trap" in said(lambda values=values: problem(make_call(replace(values, cluster=4), "fp32"), traps))


LISTED = make_call(Scores(topk.normal, 40_001, ordered=False, cluster=4), "fp32")
# A row in which there is too little to guess from.
COUNTED = make_call(Scores(topk.normal, 4001, cluster=4), "fp32")


def planted(call: Call, *changes: str) -> str:
    return said(lambda: problem(call, faulty(topk.cluster_kernel("fp32", ARCH), *changes), seed=3))


def test_a_block_that_ends_while_its_list_is_read() -> None:
    wrong = faulty(topk.cluster_kernel("fp32", ARCH), "if (thread == 0) ptx::mbarrier_wait_for_block(released, 0);", "")
    for call in (LISTED, COUNTED):
        message = said(lambda call=call: problem(call, wrong, seed=3))
        assert re.search(r"CTA \(\d+, 0, 0\) ends while|CTA \(\d+, 0, 0\), which has ended", message), message


def test_blocks_that_are_released_before_their_lists_are_read() -> None:
    message = planted(
        LISTED,
        "    const Threshold all = guess.thin ?",
        "    release_others();\n    const Threshold all = guess.thin ?",
    )
    assert re.search(r"CTA \(\d+, 0, 0\) ends while|CTA \(\d+, 0, 0\), which has ended|arriv", message), message


@pytest.mark.parametrize("call", [LISTED, COUNTED], ids=["listed", "counted"])
def test_what_is_told_before_all_blocks_run(call: Call) -> None:
    start = "    ptx::cluster_arrive_relaxed();\n"
    wait = "    ptx::cluster_wait();\n    u32 count = guess"
    message = planted(call, start, "", wait, "    u32 count = guess")
    assert "nothing has told this thread that the CTA has started" in message


def test_a_list_that_is_read_before_its_block_has_told_its_size() -> None:
    told = "ptx::store_cluster_4(ptx::cluster_address(told + 4 * rank, 0), list.size());\n"
    message = planted(COUNTED, f"{told}    meet();", f"{told}    ptx::block_sync();")
    # Whichever comes first.
    assert "not written before" in message or a_race(message, r"shared bytes \d+ to \d+(?: of CTA \(\d+, 0, 0\))?")


def test_keys_that_are_read_before_all_are_there() -> None:
    behind = "    if (thread == 0) list.set_size(0);\n    static_assert(kMostBlocks == 8);"
    message = planted(LISTED, f"    meet();\n{behind}", f"    ptx::block_sync();\n{behind}")
    assert "race" in message or "not written before" in message, message


def test_an_offset_that_forgets_the_lists_before() -> None:
    wrong = ("before += other < block ? size : 0", "before += other == 0 ? size : 0")
    assert re.search(r"race: write of shared bytes", planted(COUNTED, *wrong))
