"""Every barrier, fence, wait, commit and arrival of every family's kernels: without it, or weakened, it is noticed.

What makes no difference is listed with the reason. Every mutant of every kernel is tried. By default those on the list
take one input, unchanged kernels some orders each, and of the mutants that have texts of their own, those of warpgroup
products, one in twelve is tried; `--all-mutants` takes all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import pytest
from mutants import Mutant, mutants
from mutation_subjects import Attempt, attempts_of, kernel_of, outcome, variants

pytestmark = pytest.mark.compile


@dataclass(frozen=True)
class Equivalent:
    """A change that makes no difference: kernels by slug, changes, beginnings of CUDA lines that lead there, why.

    Where that says too little, `behind` is the beginning of the line ahead of one of those, and `copies` which of the
    instructions are meant that a line became, 0 the first.
    """

    kernels: str
    changes: tuple[str, ...]
    lines: tuple[str, ...]
    reason: str
    behind: str = ""
    copies: tuple[int, ...] = ()

    def covers(self, mutant: Mutant) -> bool:
        """Whether the mutant is one of these."""
        slug = mutant.kernel.plan.variant.slug
        found = all(any(call.startswith(line) for call in mutant.calls) for line in self.lines)
        found = found and any(line.startswith(self.behind) for line in mutant.ahead)
        found = found and (not self.copies or mutant.copy in self.copies)
        return fnmatchcase(slug, self.kernels) and mutant.change in self.changes and found


# Of the machine: no mutant may be noticed for what the emulator lacks.
LACKING = "the emulator does not have this instruction"

_MAIN = "sparse_decode-main-*"
_HOPPER = "sparse_decode-main-hopper-*"
_RESIDENT = "topk-main-row_resident-*"
_CLUSTER = "topk-main-row_cluster-*"
_LATER_SWEEP = ("first ? count<true>(t, bits) : ", "row.await(batch++);")
EQUIVALENTS = (
    Equivalent(
        "sparse_decode-main-*-sm_90a-*", ("removed",), ("RowCopy::fence_init();",),
        "the lane that issues bulk copies executes fence.proxy.async after the barrier that follows the initialisation",
    ),
    Equivalent(
        "sparse_decode-main-*-sm_90a-*", ("relaxed",), ("Copy::start(", "ptx::mbarrier_arrive(landed);"),
        "the lane that issues the copies arrives with release, too, after the warp's barrier",
    ),
    Equivalent(
        "sparse_decode-main-*-sm_90a-*", ("relaxed",),
        ("Copy::start(", "ptx::mbarrier_arrive_expect(landed, "),
        "every lane releases what it stored by an arrival of its own",
    ),
    Equivalent(
        _MAIN, ("removed", "relaxed"),
        ("accumulate<E>(slot, parity, buffer);", "ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), "),
        "score threads await the same rows before they arrive at `filled`, for which the value warps wait; a bulk "
        "copy's completion carries its proxy fence, so that knowing of it through others is enough",
    ),
    Equivalent(
        _MAIN, ("relaxed",),
        ("ScoreWarp<C, ", "ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[slot]));"),
        "a score warp's last read of a row comes before its arrivals at `filled`; the value warps wait for those and "
        "release the row in the same phase of `freed`",
    ),
    Equivalent(
        _HOPPER, ("relaxed",),
        ("HopperScore<C, ", "ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[(first + stage) % C::kStages]));"),
        "the same",
    ),
    Equivalent(
        _HOPPER, ("removed",), ("Body::run(", "ptx::grid_dependency_wait();"),
        "here a launch has no grid before it; test_overlapping_steps.py has one",
    ),
    Equivalent(
        "sparse_decode-main-hopper-*-kv.v32*", ("removed", "with a group more"),
        ("add_unit_scores<Image>(", "ptx::wgmma_wait<kDepth - 1>();"),
        "of two units of the same sums the first is awaited for its operands' registers, which PTX has anew for each",
        copies=(0, 2, 4, 6),
    ),
    Equivalent(
        _HOPPER, ("removed",), ("Copy::start(", "ptx::fence_proxy_async();"),
        "rows that are zeroed come to be copied over by way of the score threads, which read them and execute the "
        "fence behind their probabilities",
    ),
    Equivalent(
        "sparse_decode-main-hopper-*-n.8-*", ("removed",),
        ("run_score(", "ptx::fence_proxy_async();  // products read the image"),
        "of 8 heads' rows the value warps stage one each, and the score warps none",
    ),
    Equivalent(
        _HOPPER, ("removed",), ("plain_unit_scores<Image>(", "ptx::wgmma_commit();"),
        "products that all go into the same sums are waited for together; the last commit takes them along",
        copies=tuple(range(7)),
    ),
    Equivalent(
        _HOPPER, ("removed", "with a group more"), ("plain_unit_scores<Image>(", "if (unit > 0) ptx::wgmma_wait<1>();"),
        "in PTX the operands of every unit are registers of their own; the wait lets ptxas use a unit's again",
    ),
    Equivalent(
        "indexer_logits-main-hopper-*", ("relaxed",), ("ptx::mbarrier_arrive_expect(barrier, ",),
        "what lane 0 stores is read by its own warp, which meets in a barrier between filling a place of its ring and "
        "taking from it",
    ),
    Equivalent(
        "indexer_logits-main-hopper-*", ("removed", "without copies"), ("ring.take_and_refill(", "refill();"),
        "a block has at most two small tiles of a unit, which its rings have from the start: it would have three only "
        "where every unit has one, or where lengths change meanwhile",
    ),
    Equivalent(
        "indexer_logits-ragged-hopper-*", ("without copies",), ("ring.start(", "ptx::mbarrier_arrive_after_copies("),
        "before the first products of a unit every thread waits for all that it has copied, and all meet",
    ),
    Equivalent(
        "indexer_logits-ragged-hopper-*", ("removed", "relaxed"), ("turns.await();",),
        "turns are for the time that products and sums take: no data passes",
    ),
    Equivalent("indexer_logits-ragged-hopper-*", ("relaxed",), ("turns.pass(",), "the same"),
    *(
        Equivalent(
            kernels, changes, (line,),
            "the ring holds no more tiles than there are buffers: a tile lands where the one lay that had its buffer "
            "before, once the value warps have freed that, which is after their last read of the buffer",
        )
        for kernels in (
            "sparse_decode-main-mma_sync-sm_90a-*-xkv.*-n.64-*",
            "sparse_decode-main-mma_sync-sm_80-kv.bf16_d512-*",
        )
        for changes, line in (
            (("removed", "relaxed"), "ptx::mbarrier_wait(ptx::shared_address(&shared.drained[buffer]), "),
            (("relaxed",), "ptx::mbarrier_arrive(ptx::shared_address(&shared.drained[buffer]));"),
        )
    ),
    Equivalent(
        _MAIN, ("removed",), ("sync();  // the last raise may still be reading block_value",),
        "raise_reference() reads block_value before its own second barrier",
    ),
    Equivalent(
        "sparse_decode-main-mma_sync-sm_80-*", ("removed",),
        ("Copy::start(", "ptx::warp_sync();"),
        "of the producer's lanes only lane 0 stores, which then arrives itself; all lanes' copies arrive on their own",
    ),
    Equivalent(
        _RESIDENT, ("removed",), ("Copy::init(landed);", "ptx::fence_mbarrier_init();"),
        "the thread that initialises the barriers issues the copies, and executes fence.proxy.async first",
    ),
    Equivalent(
        _RESIDENT, ("removed",), ("ptx::block_sync();",),
        "the row before was read for the last time ahead of a barrier of its own, and select_row() begins with one",
        behind="for (u32 row = ptx::block_index(); ",
    ),
    Equivalent(
        _RESIDENT, ("relaxed",), ("if (!scores.taken_unread(k)) Copy::start(", "ptx::mbarrier_arrive_expect("),
        "what the threads stored at the row's ends comes to the others by the barrier that select_row() begins with",
    ),
    Equivalent(
        _CLUSTER, ("relaxed",), ("Copy::start(", "ptx::mbarrier_arrive_expect("),
        "what other threads stored at the part's ends comes by the barrier after it",
    ),
    Equivalent(
        "topk-main-row_resident-sm_90a-*", ("removed", "relaxed"), _LATER_SWEEP,
        "the sweep for the first digit has awaited what the sweeps for others read",
        copies=(1,),
    ),
    Equivalent(
        "topk-main-row_resident-sm_80-*", ("removed", "with a group more"), _LATER_SWEEP,
        "the sweep for the first digit has awaited what the sweeps for others read",
        copies=(2, 3),
    ),
    Equivalent(
        "topk-main-row_resident-sm_80-*", ("removed", "with a group more"),
        ("const Guess guess = ", "row.await_all();"),
        "the wait for the last group follows at once",
        copies=(0,),
    ),
    Equivalent(
        "topk-main-row_resident-sm_80-*", ("removed", "with a group more"),
        ("sweeps.collect(lowest, list);", "row.await(batch++);"),
        "a row neither sampled nor counted before is no longer than the list has room: less than the first batch",
        copies=(1,),
    ),
    Equivalent(
        _RESIDENT, ("removed", "relaxed", "with a group more"), ("return sweeps.emit(", "row.await_all();"),
        "the sweep for the first digit has awaited all of the row",
    ),
    Equivalent(
        "topk-*-score.bf16*", ("removed",), ("ptx::block_sync();",),
        "keys of 16 bits have two digits, of which a sweep counts the first: nothing is left to count in the loop",
        behind="if (t.covers(key(i))) digits.count(t.digit(key(i), bits));",
    ),
    Equivalent(
        "topk-select-*", ("removed",), ("room ? list_part(own, t, digits, list) : select_part(own);", "ptx::block_"),
        "until the barrier that select_row() begins with, threads clear what was theirs alone before",
        behind="u32 count = length;",
    ),
)  # fmt: skip


def _listed(mutant: Mutant) -> Equivalent | None:
    return next((known for known in EQUIVALENTS if known.covers(mutant)), None)


@pytest.mark.parametrize("slug", variants())
def test_mutants(slug: str, request: pytest.FixtureRequest) -> None:
    everything = request.config.getoption("--all-mutants")
    kernel = kernel_of(slug)
    attempts = attempts_of(kernel)
    missed, stale = [], []
    found_all = mutants(kernel)
    unchanged = next((replace(m.kernel, choice=0) for m in found_all if m.kernel.choice is not None), kernel)
    assert outcome(unchanged, attempts) == ("", None)
    for number, mutant in enumerate(found_all):
        if mutant.kernel.choice is None and not everything and number % 12:
            continue
        known = _listed(mutant)
        found, by = outcome(mutant.kernel, attempts if known is None or everything else attempts[:1])
        if found == "" and known is None:
            missed.append(str(mutant))
        if found != "" and known is not None:
            stale.append(f"{mutant}: {found.splitlines()[0]}")
        if by is not None:
            # What noticed one is likely to notice the next.
            attempts = [by, *(attempt for attempt in attempts if attempt != by)]
        assert LACKING not in found
    assert missed == []
    assert stale == []


def test_every_listed_equivalent_exists() -> None:
    found = {_listed(mutant) for slug in variants() for mutant in mutants(kernel_of(slug))}
    assert [known for known in EQUIVALENTS if known not in found] == []


@pytest.mark.parametrize("slug", variants())
def test_unchanged_kernels_give_no_report(slug: str, request: pytest.FixtureRequest) -> None:
    """20 seeds in all; by default each kernel takes other ones."""
    seeds = range(20)
    if not request.config.getoption("--all-mutants"):
        order = sorted(variants()).index(slug)
        seeds = range(order % 5, 20, 5)
    for seed in seeds:
        schedule = ("random", "priorities")[seed % 2]
        assert outcome(kernel_of(slug), [Attempt(seed + 4, schedule)]) == ("", None)
