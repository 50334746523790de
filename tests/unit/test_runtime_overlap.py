"""Which launches of a decode step overlap: as a plan is told, by the requests that it is for, where the arch can."""

from functools import partial

import pytest
import torch
from fake_driver import FakeDriver
from test_runtime_step import BATCH, NEXT_N, WIDTH, K, attention, index, make

from dsagen.dependent import LEAST_REQUESTS
from dsagen.errors import GuardError
from dsagen.runtime.driver import DeviceFacts


@pytest.mark.parametrize("body", ["hopper", "mma_sync"])
def test_launches_of_a_step_overlap_where_asked_to(body, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
    driver, kernels = make()
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    # The hopper body always begins early, and has no dependent form for that.
    always = body == "hopper"
    for overlap, expected in (
        (None, [False, False, always]),
        (True, [False, True, True]),
        (False, [False, False, always]),
    ):
        driver.launches.clear()
        plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, overlap=overlap)
        assert plan.overlaps is bool(overlap)
        for _ in range(2):
            kernels.decode_step(**attention(), **index(), plan=plan)
        assert [r.config.overlaps_previous for r in driver.launches] == expected * 2
        assert [plans[r.symbol].slug for r in driver.launches] == list(kernels.decode_step_slugs(plan)) * 2
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, overlap=True)
    kernels.decode_step(**attention(), **index(), plan=plan)
    kernels.decode_step(**attention(), plan=plan, reuse_ids=True)
    # What comes before a layer that selects nothing is not ours to trigger it.
    assert driver.launches[-1].config.overlaps_previous is always
    clustered = kernels.decode_step_slugs(kernels.plan_decode_step(BATCH, NEXT_N, 60_000, k=K, overlap=True))
    assert "row_cluster" in clustered[1] and clustered[1].endswith("launch.dependent")
    shared = kernels.decode_step_slugs(kernels.plan_decode_step(BATCH, NEXT_N, 600_000, k=K, overlap=True))
    assert [(slug.split("-")[1], slug.endswith("launch.dependent")) for slug in shared] == [
        ("main", False), ("count", True), ("select", False), ("main", not always)
    ]  # fmt: skip
    with pytest.raises(GuardError, match=r"^\[T-12\] overlap: expected True or False"):
        kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, overlap=1)


@pytest.mark.parametrize(("requests", "overlaps"), [(1, False), (63, False), (64, True), (128, True)])
def test_by_default_the_requests_of_a_plan_decide_whether_launches_overlap(requests, overlaps):
    assert LEAST_REQUESTS == 64
    _, kernels = make(index={"heads": 24, "forms": ["paged", "blocks", "candidates"]})
    assert kernels.can_overlap
    plan = kernels.plan_decode_step(requests, 1, WIDTH, k=K, candidate_blocks=5)
    assert (plan.overlaps, plan.candidates.inside.is_dependent) == (overlaps, overlaps)
    assert any(slug.endswith("launch.dependent") for slug in kernels.decode_step_slugs(plan)) is overlaps
    text = kernels.explain("decode_step", batch=requests, width=WIDTH)
    assert ("top-k and attention begin while the stage before them ends" in text) is overlaps
    assert ("(overlap=True asks for it)" in text) is not overlaps
    assert "from 64 requests on: an H200 is faster so with 128, slower with 16" in text


@pytest.mark.parametrize("body", ["hopper", "mma_sync"])
@pytest.mark.parametrize(
    ("requests", "width", "begins_early"),
    [
        (4, 16_384, None),
        (64, 16_384, True),
        (64, 60_000, False),  # a row each for blocks that sweep it
        (200, 4096, False),  # several rows an SM
    ],
)
def test_what_is_told_of_a_step_is_what_its_plan_launches(requests, width, begins_early, body, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
    _, kernels = make()
    text = kernels.explain("decode_step", batch=requests, width=width, topk=K)
    scoring, selecting, attending = kernels.decode_step_slugs(kernels.plan_decode_step(requests, 1, width, k=K))[:3]
    assert selecting.endswith("launch.dependent") is (begins_early is True)
    for line in (f"kernel: {scoring}", f"chosen: {selecting}", f"chosen: {attending}"):
        assert line in text.splitlines()
    assert ("top-k and attention begin while the stage before them ends" in text) is (begins_early is True)
    only = "slower with 16); of so many rows, or such long"
    assert (only in text) is (begins_early is False)
    # Calls by themselves follow nothing of ours.
    assert "launch.dependent" not in kernels.explain("topk", batch=requests, width=width)


def test_plans_say_what_they_are():
    _, kernels = make()
    plan = kernels.plan_decode_step(64, 1, 16_384, k=K)
    scoring, selecting, attending = plan.slugs
    assert plan.slugs == kernels.decode_step_slugs(plan)
    size = kernels.decode_step_workspace_bytes(64, 1, 16_384, k=K)
    assert repr(plan) == (
        f"DecodeStepPlan(batch=64, next_n=1, max_seq_len=16384, k=32, kernels={[scoring, selecting, attending]}, "
        f"num_splits=1, launches=3, workspace_bytes={size}, overlaps=True, device='cpu')"
    )
    assert repr(plan.selection) == (
        f"TopkPlan(rows=64, width=16384, k=32, kernels={[selecting]}, parts=1, launches=1, workspace_bytes=0, "
        "overlaps=True, device='cpu')"
    )
    split = kernels.plan_topk(2, 600_000, K)
    count, select = kernels.topk_slugs(torch.zeros(2, 600_000), k=K)
    assert repr(split) == (
        f"TopkPlan(rows=2, width=600000, k=32, kernels={[count, select]}, parts=66, launches=2, "
        f"workspace_bytes={split.workspace_bytes}, overlaps=False, device='cpu')"
    )
    decode = kernels.plan_sparse_decode(2, 1, 64, num_splits=1)
    assert repr(decode) == (
        f"SparseDecodePlan(batch=2, s_q=1, topk=64, kernels={list(decode.slugs)}, num_splits=1, "
        "launches=1, workspace_bytes=0, overlaps=True, device='cpu')"
    )


def test_launches_do_not_overlap_where_the_arch_has_no_such_launches():
    old = partial(FakeDriver, DeviceFacts("fake A100", (8, 0), 108, 163 * 1024))
    driver, kernels = make(driver=old, archs=["sm_80"])
    assert not kernels.can_overlap and not kernels.plan_decode_step(64, 1, WIDTH, k=K).overlaps
    assert "overlap" not in kernels.explain("decode_step", batch=64, width=WIDTH).split("attention")[0]
    kernels.decode_step(**attention(), **index(), plan=kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K))
    assert [r.config.overlaps_previous for r in driver.launches] == [False] * 3
    kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, overlap=False)
    with pytest.raises(GuardError, match=r"^\[T-22\] overlap: sm_80 has no programmatic dependent launch"):
        kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, overlap=True)
