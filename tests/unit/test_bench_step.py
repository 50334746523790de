"""The benchmark of decode steps without a device: cases, goals, inputs, what is verified, and what the sweep takes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.arch import H200
from dsagen.bench import logits_run, run, step_run, sweep, topk_run
from dsagen.bench.axes import SweepAxes
from dsagen.bench.step_data import StepBenchCase, make_pools, step_cases, step_inputs
from dsagen.bench.step_figures import GOALS_US, STAGES, StepFigures, step_floor_us
from dsagen.bench.timing import Timing, input_sets_for
from dsagen.cli.page import _case_name
from dsagen.errors import CheckFailed, SpecError
from dsagen.matrix import expand
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

SPEC = load_spec("v32_decode_h16")
CASE = StepBenchCase("v32", 16, 64, 128, "fp8", "fp32", 16, 1, 131072, 2048)
FIGURES = StepFigures(
    "v32_decode_h16",
    ("s",),
    "NVIDIA H200",
    "sm_90a",
    CASE,
    100.0,
    0.01,
    2,
    103.0,
    (60.0, 20.0, 18.0),
    30.0,
    101.0,
    70.0,
)
SMALL = replace(CASE, index_heads=8, requests=2, next_n=2, context=192, selected=48, page_size=16)


def test_the_cases_are_those_that_have_goals():
    shapes = {(case.kv_format, case.heads, case.requests, case.context) for case in step_cases(SPEC)}
    assert shapes == set(GOALS_US) and CASE in step_cases(SPEC)
    assert {case.selected for case in step_cases(SPEC.replace(topk=512))} == {512}
    two = {"model": "v41", "heads": 16, "archs": ["sm_90a"], "ops": list(SPEC.ops), "index": {"keys": "fp8"}}
    with pytest.raises(SpecError, match="steps of specs with a second cache or several KV heads are not measured"):
        step_cases(load_spec(two))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"requests": 0}, "requests must be at least 1"),
        ({"context": 100}, "context 100: must fill pages of 64"),
        ({"selected": 131072}, "context 131072: must .* exceed the 131072 selected"),
    ],
)
def test_a_case_that_cannot_be_drawn_is_refused(change, text):
    with pytest.raises(SpecError, match=text):
        replace(CASE, **change)


def test_the_floor_reads_keys_and_rows_once_or_computes():
    bytes_read = 16 * (131072 * 132 + 2048 * 656)
    assert step_floor_us(CASE, H200) == pytest.approx(bytes_read / 4530e9 * 1e6)
    # e4m3 products take half the time of those of 16 bits.
    flops = 2 * 128 * 8 * (131072 * 64 * 128 / 2 + 16 * 2048 * (576 + 512))
    assert step_floor_us(replace(CASE, requests=128, next_n=8), H200) == pytest.approx(flops / 797e12 * 1e6)
    assert [input_sets_for(case.read_bytes, most=step_run.MOST_SETS) for case in step_cases(SPEC)] == [15, 2, 2]


def test_figures_are_plain_data_and_a_row():
    assert (FIGURES.goal_us, FIGURES.missed) == (105.0, ())
    assert replace(FIGURES, gpu_us=110.0).missed == ("110.0 us, goal 105.0 us",)
    for other in ({"device": "NVIDIA H100"}, {"case": replace(CASE, next_n=2)}, {"case": replace(CASE, heads=8)}):
        assert replace(FIGURES, **other).goal_us is None
    document = json.loads(json.dumps(FIGURES.to_json(), allow_nan=False))
    assert document["stage_us"] == dict(zip(STAGES, (60.0, 20.0, 18.0), strict=True)) and document["goal_us"] == 105.0
    assert len(FIGURES.cells()) == len(FIGURES.header)
    assert FIGURES.title == "step of 16 requests, 131072 keys, k 2048"
    assert _case_name(FIGURES.to_json()) == "step of 16 x 1, 131072 keys"
    # What draws other ops goes by these.
    assert not {"batch", "width", "rows"} & set(document["case"])
    assert (
        replace(FIGURES, record_us=90.0).slower and not FIGURES.slower and FIGURES.floor_ratio == pytest.approx(10 / 7)
    )
    plans = expand(SPEC).plans()
    ran = replace(FIGURES, slugs=(plans[0].slug, plans[-1].slug))
    assert [ran.took_part(plan) for plan in plans] == [True, *[False] * (len(plans) - 2), True]
    assert ran.measured_spec(SPEC) is SPEC


def test_requests_have_pages_of_their_own():
    pools = make_pools(SMALL, 3, device="cpu")
    assert pools.index.shape == (36, 16, 1, 132) and pools.kv.k_cache.shape == (36, 16, 1, 656)
    scales = pools.index.view(36, -1)[:, 16 * 128 :].contiguous().view(torch.float32)
    assert bool(((scales > 0) & (scales < 0.01)).all())
    first, second = step_inputs(SMALL, pools, 2)
    pages = [[sorted(row) for row in item.block_table.tolist()] for item in (first, second)]
    regions = [list(range(12)), list(range(12, 24)), list(range(24, 36))]
    assert pages == [[regions[0], regions[1]], [regions[2], regions[0]]]
    assert not torch.equal(first.q, second.q) and first.index_cache is second.index_cache


# ---- a step of the emulator's in place of a device's


@pytest.fixture
def kernels(shared_store, shared_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = SPEC.replace(index={"heads": 8, "dim": 128, "keys": "fp8"})
    yield dsagen.load(spec, device="emulator", emulator=EmulatorOptions(races=False))
    torch.set_num_threads(threads)


def timed(seen):
    def time_us(calls):
        for call in calls:
            call()
        seen.append(len(calls))
        return Timing(10.0 * len(seen), 0.01, len(calls), 9)

    return time_us


@pytest.mark.compile
def test_a_step_is_verified_and_timed_with_its_stages(kernels, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(step_run, "graph_time_us", timed(seen))
    monkeypatch.setattr(step_run, "eager_cost_us", lambda calls: (3.0, 4.0))
    inputs = step_inputs(SMALL, make_pools(SMALL, 3, device="cpu"), 2)
    found = step_run.measure_step(kernels, SMALL, inputs)
    assert seen == [2] * 5 and (found.gpu_us, found.apart_us, found.stage_us) == (10.0, 20.0, (30.0, 40.0, 50.0))
    assert (found.issue_us, found.wall_us, found.input_sets, found.device) == (3.0, 4.0, 2, "NVIDIA H200")
    assert [slug.split("-")[0] for slug in found.slugs][:3] == ["indexer_logits", "topk", "sparse_decode"]
    assert found.floor_us == pytest.approx(step_floor_us(SMALL, H200))
    plan = kernels.plan_decode_step(2, 2, 192, k=48)
    for spoil, text in (
        (lambda _: plan.scores.add_(1), "scores are off"),
        (lambda _: plan.ids.copy_(plan.ids.flip(0)), "what was selected is not the top-k"),
        (lambda out: out.mul_(1.1), "elements off"),
    ):
        out, lse = step_run.step_calls(kernels, SMALL, plan, inputs)[0]()
        assert step_run.step_problem(kernels.spec, SMALL, inputs[0], plan, out, lse, "sm_90a") == ""
        spoil(out)
        assert text in step_run.step_problem(kernels.spec, SMALL, inputs[0], plan, out, lse, "sm_90a")
    monkeypatch.setattr(step_run, "step_problem", lambda *_: "wrong")
    with pytest.raises(CheckFailed, match=r"v32_decode_h16: StepBenchCase\(.*\): wrong; it was not timed"):
        step_run.measure_step(kernels, SMALL, inputs)


# ---- the sweep


def test_the_sweep_measures_all_of_a_spec_or_one_op(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(run, "sweep_decode", lambda specs, **_: asked.extend("sparse_decode" for _ in specs) or [])
    monkeypatch.setattr(topk_run, "sweep_topk", lambda *_, **__: asked.append("topk") or [])
    monkeypatch.setattr(logits_run, "sweep_logits", lambda *_, **__: asked.append("indexer_logits") or [])
    monkeypatch.setattr(step_run, "sweep_steps", lambda *_, **__: asked.append("decode_step") or [])
    every = ["sparse_decode", "topk", "indexer_logits", "decode_step"]
    for only, want in ((None, every), *((op, [op]) for op in sweep.MEASURED)):
        asked.clear()
        sweep.run_sweep([SPEC], only=only)
        assert asked == want
    asked.clear()
    sweep.run_sweep([SPEC], axes=SweepAxes(batch=(3,)))
    assert asked == ["sparse_decode"]
    # Steps over other index keys are told, and the ops of such a spec are measured.
    said: list[str] = []
    other = SPEC.replace(index={**SPEC.to_mapping()["index"], "keys": "mxfp4"})
    sweep.run_sweep([other], progress=said.append)
    assert asked[1:] == every[:-1] and "steps are measured with fp8 index keys in pages only" in said[-1]
    with pytest.raises(
        SpecError, match="v32_h16: decode_step takes indexer_logits, topk, sparse_decode, which its ops"
    ):
        sweep.run_sweep([load_spec("v32_h16")], only="decode_step")


def test_a_wrong_step_is_told_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(dsagen, "load", lambda spec: SimpleNamespace(spec=spec, prepare=lambda: None, device="cpu"))
    monkeypatch.setattr(step_run, "make_pools", lambda *_, **__: None)
    monkeypatch.setattr(step_run, "step_inputs", lambda *_, **__: [])
    told: list[str] = []

    def measure(kernels, case, inputs):
        if case.requests == 16:
            raise CheckFailed("is wrong")
        return replace(FIGURES, case=case)

    monkeypatch.setattr(step_run, "measure_step", measure)
    records = {step_run.case_key(replace(CASE, requests=128).to_json()): 99.0}
    said: list[str] = []
    found = step_run.sweep_steps(SPEC, seed=0, records=records, progress=said.append, wrong=told.append)
    assert [(f.case.requests, f.record_us) for f in found] == [(1, None), (128, 99.0)]
    assert told == ["is wrong"] and len(said) == 2
