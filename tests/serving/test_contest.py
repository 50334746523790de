"""The contest's kernels by its rules: some workloads on the emulator, all of them on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dsagen
from dsagen.bench import contest_data as contest
from dsagen.check.run import device_problem
from dsagen.compat.contest import ATTENTION, INDEXER, run_attention, run_indexer, use
from dsagen.errors import GuardError
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

CPU, PAGES = torch.device("cpu"), 300
INDEXER_WORKLOADS, ATTENTION_WORKLOADS = contest.indexer_workloads(), contest.attention_workloads()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    INDEXER.forget()
    ATTENTION.forget()


@pytest.fixture
def emulated(shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    for name in ("contest_indexer_h64", "contest_attention_h16"):
        use(dsagen.load(name, device="emulator", emulator=EmulatorOptions(races=False)))


def test_workloads_are_shaped_as_the_inventory_has_them():
    widths = [work.max_num_pages for work in INDEXER_WORKLOADS]
    assert [sum(low <= w <= high for w in widths) for low, high in ((1, 32), (33, 45), (82, 91))] == [69, 39, 20]
    assert all(1 <= len(work.seq_lens) <= 31 and max(work.seq_lens) <= 5806 for work in INDEXER_WORKLOADS)
    slow = INDEXER_WORKLOADS[69:]
    assert all(sum(length > contest.K for length in work.seq_lens) == 1 for work in slow)
    assert sum(not work.contiguous for work in slow) == 42
    assert {len(work.counts) for work in ATTENTION_WORKLOADS} == {1, 2, 6, 7, 8} and len(ATTENTION_WORKLOADS) == 23
    assert [max(ATTENTION_WORKLOADS[n].counts) for n in (0, -1)] == [18, 2048]


# The shortest of those without, and of each kind with scores.
@pytest.mark.compile
@pytest.mark.parametrize("kind", [range(69), range(69, 108), range(108, 128)], ids=["whole", "33..45", "82..91"])
def test_indexer_on_the_emulator(kind: range, emulated: None) -> None:
    work = min((INDEXER_WORKLOADS[number] for number in kind), key=lambda work: sum(work.seq_lens))
    inputs = contest.indexer_inputs(work, PAGES, CPU)
    found = run_indexer(*inputs)
    assert contest.indexer_problem(inputs, found) == ""
    given = torch.empty_like(found)
    assert run_indexer(*inputs, given) is given and given.sort(1).values.equal(found.sort(1).values)


@pytest.mark.compile
def test_attention_on_the_emulator(emulated: None) -> None:
    for work in (ATTENTION_WORKLOADS[0], ATTENTION_WORKLOADS[3]):
        inputs = contest.attention_inputs(work, PAGES, CPU)
        found = run_attention(*inputs)
        assert contest.attention_problem(inputs, found) == ""
        given = torch.empty_like(found[0]), torch.empty_like(found[1])
        for again in (run_attention(*inputs, *given), given):
            assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.compile
def test_an_empty_row_has_the_definitions_values(emulated: None) -> None:
    inputs = contest.attention_inputs(contest.AttentionWorkload((0, 5)), PAGES, CPU)
    out, lse = run_attention(*inputs)
    assert not bool(out[0].any()) and bool((lse[0] == -torch.inf).all()) and bool(lse[1].isfinite().all())
    lens = contest.indexer_inputs(contest.IndexerWorkload((5, 9), 3), PAGES, CPU)
    lens[3][0] = 0
    assert bool((run_indexer(*lens)[0] == -1).all()) and contest.indexer_problem(lens, run_indexer(*lens)) == ""


@pytest.mark.compile
@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (5, torch.zeros(2), r"\[T-20\] run_attention: sm_scale: float32 \(2,\): expected a float, or a tensor of one"),
        (5, torch.zeros(0), r"\[T-20\] run_attention: sm_scale: float32 \(0,\): expected a float"),
        (5, torch.zeros(1, device="meta"), r"\[T-14\] sm_scale: has no memory"),
        (1, "meta", r"\[T-14\] q_pe: has no memory"),
        (1, "grad", r"\[T-02\] q_pe: requires grad"),
    ],
)
def test_inputs_that_hold_nothing_are_named(emulated: None, at: int, wrong: torch.Tensor | str, message: str) -> None:
    inputs = list(contest.attention_inputs(contest.AttentionWorkload((5,)), PAGES, CPU))
    if isinstance(wrong, str):
        wrong = inputs[at].requires_grad_() if wrong == "grad" else inputs[at].to("meta")
    inputs[at] = wrong
    with pytest.raises(GuardError, match=rf"^{message}"):
        run_attention(*inputs)


# ---- the rules can fail


def right_ids(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """By the rules' own scores."""
    q, cache, weights, lens, table = inputs
    ids = torch.full((q.shape[0], contest.K), -1, dtype=torch.int32)
    for row, length in enumerate(lens.tolist()):
        best = contest._scores(q[row], cache, weights[row], table[row], length).topk(min(contest.K, length)).indices
        ids[row, : len(best)] = (table[row].long()[best // 64] * 64 + best % 64).int()
    return ids


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda ids: ids, ""),
        (lambda ids: ids.flip(1), ""),
        (lambda ids: ids.long(), "torch.int64 (1, 2048)"),
        (lambda ids: ids[:, :2000], "torch.int32 (1, 2000)"),
        (lambda ids: ids.index_fill(1, torch.tensor([7]), -1), "row 0: 2047 ids of 2048"),
        (lambda ids: ids.index_copy(1, torch.tensor([7]), ids[:, 8:9]), "row 0: an id twice"),
        (lambda ids: ids.index_fill(1, torch.tensor([7]), PAGES * 64 - 1), "row 0: an id of no key of the row"),
    ],
)
def test_what_the_rules_say_of_ids(wrong, complaint: str) -> None:
    inputs = contest.indexer_inputs(contest.IndexerWorkload((2100,), 33, contiguous=True), PAGES, CPU)
    found = contest.indexer_problem(inputs, wrong(right_ids(inputs)))
    assert found == complaint


def test_the_rules_see_worse_keys_and_values() -> None:
    inputs = contest.indexer_inputs(contest.IndexerWorkload((2800,), 44), PAGES, CPU)
    others = (*inputs[:2], -inputs[2], *inputs[3:])
    assert "scores are not those of the best keys" in contest.indexer_problem(inputs, right_ids(others))
    inputs = contest.attention_inputs(contest.AttentionWorkload((30, 7)), PAGES, CPU)
    out, lse = contest.attention_reference(inputs)
    assert contest.attention_problem(inputs, (out, lse)) == contest.attention_problem(inputs, (out.bfloat16(),)) == ""
    assert "output: " in contest.attention_problem(inputs, (out * 1.05, lse))
    assert "lse: " in contest.attention_problem(inputs, (out, lse * 0.693147))
    assert "infinite or NaN" in contest.attention_problem(
        inputs, (out.index_fill(0, torch.tensor([0]), torch.nan), lse)
    )


# ---- what does not fit


def test_bad_inputs_are_named(emulated: None) -> None:
    q, cache, weights, lens, table = contest.indexer_inputs(contest.IndexerWorkload((5, 9), 3), 4, CPU)
    for arguments, message in (
        ((q.float(), cache, weights, lens, table.expand(2, 3).repeat(1, 20)), "[T-04] q_index_fp8: dtype float32"),
        ((q[:, :8], cache, weights, lens, table.repeat(1, 20)), "[T-06] q_index_fp8: shape"),
        ((q, cache.view(8, 32, 1, 132), weights, lens, table), "[T-20] run_indexer: k_index_cache_fp8: pages of 32"),
        ((q, cache, weights, lens.long(), table), "[T-04] seq_lens: dtype int64"),
        ((q, cache, weights, lens, table.long()), "[T-04] block_table: dtype int64"),
        ((q, cache, weights, lens[None], table), "[T-20] run_indexer: seq_lens: 2 dims"),
        ((q, cache, weights, lens, table, torch.zeros(2, 9).int()), "[T-06] topk_indices: shape (2, 9)"),
    ):
        with pytest.raises(GuardError) as caught:
            run_indexer(*arguments)
        assert str(caught.value).startswith(message)
    nope, pe, ckv, kpe, ids, scale = contest.attention_inputs(contest.AttentionWorkload((3, 1)), 4, CPU)
    for arguments, message in (
        ((nope.float(), pe, ckv, kpe, ids, scale), "[T-20] run_attention: q_nope: torch.float32"),
        ((nope, pe[:, :8], ckv, kpe, ids, scale), "[T-20] run_attention: q_pe: torch.bfloat16 (2, 8, 64)"),
        ((nope, pe, ckv.float(), kpe, ids, scale), "[T-04] ckv_cache: dtype float32"),
        ((nope, pe, ckv, kpe, ids.long(), scale), "[T-04] sparse_indices: dtype int64"),
        ((nope, pe, ckv, kpe, ids[:1], scale), "[T-20] run_attention: sparse_indices: 1 rows"),
        ((nope, pe, ckv, kpe, ids, "1"), "[T-12] sm_scale: expected a number"),
        ((nope, pe, ckv, kpe, ids, scale, nope.float()), "[T-04] output: dtype float32"),
        ((nope, pe, ckv, kpe, ids, scale, None, nope), "[T-20] run_attention: lse: 3 dims"),
    ):
        with pytest.raises(GuardError) as caught:
            run_attention(*arguments)
        assert str(caught.value).startswith(message)
    with pytest.raises(GuardError, match=r"^\[T-20\] use: kernels: expected what dsagen.load gives for contest_"):
        use(None)


# ---- all of them, on a device


@pytest.mark.gpu
def test_all_workloads_on_a_device() -> None:
    problem = device_problem(load_spec("contest_attention_h16"))
    if problem:
        pytest.skip(problem)
    device, problems = torch.device("cuda", torch.cuda.current_device()), []
    for number, work in enumerate(INDEXER_WORKLOADS):
        inputs = contest.indexer_inputs(work, contest.INDEXER_PAGES, device, seed=number)
        problems.append(contest.indexer_problem(inputs, run_indexer(*inputs)))
    for number, work in enumerate(ATTENTION_WORKLOADS):
        inputs = contest.attention_inputs(work, contest.ATTENTION_PAGES, device, seed=number)
        problems.append(contest.attention_problem(inputs, run_attention(*inputs)))
    assert [problem for problem in problems if problem] == [] and len(problems) == 151
