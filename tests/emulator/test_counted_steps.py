"""Steps whose scores are counted where they are made select what others do whose top-k counts, whatever scores are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_overlapping_steps import spoil

import dsagen
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs
from dsagen.emulator import DEVICE
from dsagen.errors import EmulatorError
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile

# Rows that blocks share, most of them short; one is not scored.
BATCH, WIDTH, K, PAGE = 3, 33_000, 64, 64
LENGTHS = (5000, 700, 20)
SPEC = load_spec("v32_decode_histogram_h16")


@pytest.fixture(autouse=True)
def no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share rows as where no clusters hold them."""
    monkeypatch.setenv("DSAGEN_TOPK_CLUSTER", "1")


def load(launches: list[EmulatedLaunch] | None = None) -> Any:
    observe = None if launches is None else launches.append
    return dsagen.load(SPEC, device=DEVICE, emulator=EmulatorOptions(seed=1, threads=1, observe=observe))


def inputs_of(contents: Contents) -> LogitsInputs:
    """Index keys of a step, with table entries that name no page: whose scores are -inf."""
    case = LogitsCase("", BATCH, 1, WIDTH, PAGE, contents=contents, lengths=Lengths.WHOLE, wild=True)
    assert SPEC.index is not None
    found = make_inputs(case, index_format(SPEC.index.keys), SPEC.index, torch.Generator().manual_seed(5))
    found.context_lens.copy_(torch.tensor(LENGTHS)[:, None])
    return found


def step(kernels: Any, plan: Any, inputs: LogitsInputs, **more: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scores as far as they are written, ids and counts of a step."""
    columns = -(-WIDTH // PAGE)
    pages = torch.arange(BATCH * columns, dtype=torch.int32).view(BATCH, columns)
    q = torch.zeros(BATCH, 1, 16, 576, dtype=torch.bfloat16)
    k_cache = torch.zeros(BATCH * columns, PAGE, 1, 656, dtype=torch.uint8)
    names = ("index_q", "index_cache", "weights", "context_lens", "block_table")
    given = dict(zip(names, inputs.tensors, strict=True))
    kernels.decode_step(q, k_cache, plan=plan, kv_block_table=pages, **{**given, **more})
    scored = [plan.scores[row, :length].clone() for row, length in enumerate(LENGTHS) if length > K]
    return (*scored, plan.ids.clone(), plan.counts.clone())


@pytest.fixture
def kernels() -> Any:
    return load()


@pytest.mark.parametrize("contents", [Contents.INTEGER, Contents.SPECIAL])
def test_the_same_is_selected_as_where_top_k_counts(contents: Contents, kernels: Any) -> None:
    """Whole numbers, of which many are equal; infinities and NaN, and keys on no page."""
    inputs = inputs_of(contents)
    plans = [
        kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, determinism="order", histogram=counts)
        for counts in (True, False)
    ]
    names = [[slug.split("-")[1] for slug in kernels.decode_step_slugs(plan)] for plan in plans]
    assert (names[0][:2], names[1][:3]) == (["counted", "select"], ["main", "count", "select"])
    # Twice, since the first leaves the histograms to the second.
    counted, again, uncounted = (step(kernels, plan, inputs) for plan in (plans[0], plans[0], plans[1]))
    for first, second, other in zip(counted, again, uncounted, strict=True):
        assert first.view(torch.int32).equal(second.view(torch.int32))
        assert first.view(torch.int32).equal(other.view(torch.int32))
    histograms = plans[0].selection.workspace[: BATCH << 13]
    assert not bool(histograms.any())
    chosen, how_many = topk_reference(plans[0].scores, K, lengths=torch.tensor(LENGTHS))
    pages = torch.arange(BATCH * -(-WIDTH // PAGE)).view(BATCH, -1)
    assert counted[-2].view(BATCH, K).long().equal(translate_reference(chosen, page_table=pages, page_size=PAGE))
    assert counted[-1].view(-1).long().equal(how_many)


def test_counts_of_a_step_that_was_refused_are_not_counted_again(kernels: Any) -> None:
    inputs = inputs_of(Contents.INTEGER)
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, determinism="order")
    first = step(kernels, plan, inputs)
    # What the first launch had added when the second one was refused.
    plan.selection.workspace.view(torch.int32)[: BATCH << 11] = 7
    plan.selection.spoil()
    for mine, theirs in zip(first, step(kernels, plan, inputs), strict=True):
        assert mine.equal(theirs)


def test_a_selection_that_does_not_wait_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "topk_select")
    launches: list[EmulatedLaunch] = []
    kernels = load(launches)
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, overlap=True)
    early = r"which the grid before writes, ahead of griddepcontrol\.wait"
    with pytest.raises(EmulatorError, match=early):
        step(kernels, plan, inputs_of(Contents.INTEGER))
    assert [launch.symbol.split("_")[3] for launch in launches[:1]] == ["counted"]
