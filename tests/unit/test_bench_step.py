"""The benchmark of decode steps without a device: cases, goals, inputs, what is verified, and what the sweep takes."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.arch import H200
from dsagen.bench import logits_run, run, step_run, sweep, topk_run
from dsagen.bench.axes import SweepAxes
from dsagen.bench.figures import PeerFigure
from dsagen.bench.step_data import CHOOSE, USE, StepBenchCase, StepResult, make_pools, step_cases, step_inputs
from dsagen.bench.step_figures import GOALS_US, STAGES, StepFigures, step_floor_us
from dsagen.bench.timing import Timing, input_sets_for
from dsagen.cli.page import _case_name
from dsagen.errors import CheckFailed, SpecError
from dsagen.matrix import expand
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

SPEC = load_spec("v32_decode_h16")
V41 = load_spec(
    {"model": "v41", "heads": 16, "archs": ["sm_90a"], "ops": list(SPEC.ops), "index": {"heads": 8, "keys": "mxfp4"}}
)
LEVELS = V41.replace(index={"heads": 8, "keys": "mxfp4", "forms": ["paged", "blocks", "candidates"]})
CASE = StepBenchCase("v32", 16, 64, 128, "fp8", "fp32", 16, 1, 131072, 2048)
FIGURES = StepFigures(
    "v32_decode_h16",
    ("s",),
    "NVIDIA H200",
    "sm_90a",
    100.0,
    0.01,
    2,
    30.0,
    101.0,
    70.0,
    CASE,
    99.0,
    103.0,
    (60.0, 20.0, 18.0),
)
SMALL = replace(CASE, index_heads=8, requests=2, next_n=2, context=192, selected=48, page_size=16)


def test_the_cases_are_those_that_have_goals():
    shapes = {(case.kv_format, case.heads, case.requests, case.context) for case in step_cases(SPEC)}
    assert shapes == set(GOALS_US) and CASE in step_cases(SPEC)
    assert {case.selected for case in step_cases(SPEC.replace(topk=512))} == {512}
    (*_, v41) = step_cases(V41)
    assert (v41.kv_format, v41.window_format, v41.window, v41.selected) == (
        "v41_fp4_interleaved",
        "v41_interleaved",
        128,
        512,
    )
    assert v41.to_json()["window"] == 128 and "window" not in CASE.to_json()
    assert v41.read_bytes == 128 * (131072 * 68 + 512 * 288 + 128 * 528)
    assert v41.attention_flops == 2 * 128 * 16 * (512 + 128) * (512 + 512)
    with pytest.raises(SpecError, match="steps over caches of several KV heads or in several tensors"):
        step_cases(SPEC.replace(kv="bf16_split"))


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
    for selects in (CHOOSE, USE):
        layer = replace(CASE, selects=selects, candidate_blocks=2048)
        assert replace(FIGURES, case=layer, gpu_us=110.0).missed == ()
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
    assert bool(((scales >= 0.5) & (scales < 1.5)).all())
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
    assert seen == [2] * 6 and found.stage_us == (40.0, 50.0, 60.0)
    assert (found.gpu_us, found.overlapping_us, found.apart_us) == (10.0, 20.0, 30.0)
    assert (found.issue_us, found.wall_us, found.input_sets, found.device) == (3.0, 4.0, 2, "NVIDIA H200")
    assert [slug.split("-")[0] for slug in found.slugs][:3] == ["indexer_logits", "topk", "sparse_decode"]
    assert found.floor_us == pytest.approx(step_floor_us(SMALL, H200))
    plan = kernels.plan_decode_step(2, 2, 192, k=48)
    promise = step_run.our_promise(kernels.spec, "sm_90a")
    for spoil, text in (
        (lambda _: plan.scores.add_(1), "scores are off"),
        (lambda _: plan.scores.fill_(torch.nan), "scores are off by up to nan"),
        (lambda _: plan.ids.copy_(plan.ids.flip(0)), "what was selected is not the top-k"),
        (lambda out: out.mul_(1.1), "elements off"),
    ):
        out, lse = step_run.step_calls(kernels, SMALL, [plan] * 2, inputs)[0]()
        result = StepResult(plan.scores, plan.ids, out, lse)
        assert step_run.step_problem(kernels.spec, SMALL, inputs[0], result, promise) == ""
        spoil(out)
        assert text in step_run.step_problem(kernels.spec, SMALL, inputs[0], result, promise)
    monkeypatch.setattr(step_run, "step_problem", lambda *_: "wrong")
    with pytest.raises(CheckFailed, match=r"v32_decode_h16: StepBenchCase\(.*\): wrong; it was not timed"):
        step_run.measure_step(kernels, SMALL, inputs)


@pytest.mark.parametrize("declared", [True, False])
def test_a_step_with_counted_scores_is_timed_beside_one_without(declared, monkeypatch):
    """On stand-ins for a device, which tell which plans are timed."""
    asked: list[dict[str, object]] = []

    class Counted:
        def __init__(self, spec):
            self.spec, self.device, self.can_overlap = spec, torch.device("cpu"), True

        def plan_decode_step(self, *sizes, **options):
            asked.append({name: value for name, value in options.items() if name != "k"})
            counted = declared and options.get("histogram") is not False
            return SimpleNamespace(
                selection=SimpleNamespace(counted=object() if counted else None), rebind=lambda: None
            )

        def decode_step_slugs(self, plan, candidates):
            return ("counted",)

    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    times = iter(range(10, 100, 10))
    monkeypatch.setattr(step_run, "step_calls", lambda *_: [lambda: None] * 2)
    monkeypatch.setattr(step_run, "stage_calls", lambda *_: ([], [], []))
    monkeypatch.setattr(step_run, "result_of", lambda *_: None)
    monkeypatch.setattr(step_run, "step_problem", lambda *_: "")
    monkeypatch.setattr(step_run, "graph_time_us", lambda _: Timing(float(next(times)), 0.01, 2, 9))
    monkeypatch.setattr(step_run, "eager_cost_us", lambda calls: (3.0, 4.0))
    found = step_run.measure_step(Counted(SPEC), SMALL, [SimpleNamespace()] * 2)
    plain = [{"histogram": False, "overlap": True}, {"histogram": False, "overlap": False}] if declared else []
    assert asked == [{}, {}, {"overlap": True}, {"overlap": False}, *plain]
    assert (found.gpu_us, found.overlapping_us, found.apart_us) == (10.0, 20.0, 30.0)
    assert found.uncounted_us == ((40.0, 50.0) if declared else None)
    assert found.stage_us == ((60.0, 70.0, 80.0) if declared else (40.0, 50.0, 60.0))
    document = found.to_json()
    assert (document.get("uncounted_us"), document.get("uncounted_apart_us")) == (
        (40.0, 50.0) if declared else (None, None)
    )
    assert len(found.cells()) == len(found.header) and ("40.0, 50.0" in found.cells()) == declared


@pytest.mark.compile
def test_a_step_over_two_caches_and_keys_of_blocks_is_verified(shared_store, shared_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    case = replace(step_cases(V41)[0], requests=2, context=96, selected=40, page_size=16, window=20)
    kernels = dsagen.load(V41, device="emulator", emulator=EmulatorOptions(races=False))
    monkeypatch.setattr("dsagen.bench.step_data.WINDOW_TOKENS", 64)
    (item,) = step_inputs(case, make_pools(case, 2, device="cpu"), 1)
    plan = kernels.plan_decode_step(2, 1, 96, k=40, window=20)
    out, lse = step_run.step_calls(kernels, case, [plan], [item])[0]()
    promise = step_run.our_promise(V41, "sm_90a")
    assert step_run.step_problem(V41, case, item, StepResult(plan.scores, plan.ids, out, lse), promise) == ""
    for stage in step_run.stage_calls(kernels, case, [plan], [item]):
        stage[0]()
    wrong = StepResult(plan.scores, plan.ids, out.mul(1.1), lse)
    assert "elements off" in step_run.step_problem(V41, case, item, wrong, promise)


@pytest.mark.compile
@pytest.mark.parametrize("selects", [CHOOSE, USE])
def test_layers_with_candidate_blocks_are_verified_and_timed(selects, shared_store, shared_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    monkeypatch.setattr("dsagen.bench.step_data.WINDOW_TOKENS", 64)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    (full,) = (case for case in step_cases(LEVELS) if (case.requests, case.selects) == (1, selects))
    case = replace(full, requests=2, context=192, selected=24, page_size=16, window=20, candidate_blocks=5)
    kernels = dsagen.load(LEVELS, device="emulator", emulator=EmulatorOptions(races=False))
    inputs = step_inputs(case, make_pools(case, 3, device="cpu"), 2)
    seen: list[int] = []
    monkeypatch.setattr(step_run, "graph_time_us", timed(seen))
    monkeypatch.setattr(step_run, "eager_cost_us", lambda calls: (3.0, 4.0))
    found = step_run.measure_step(kernels, case, inputs)
    assert seen == [2] * 6 and {CHOOSE: "blocks", USE: "candidates"}[selects] == found.slugs[0].split("-")[1]
    assert found.title.endswith(f"k 24, {selects} 5 blocks")
    assert _case_name(found.to_json()) == f"step of 2 x 1, 192 keys, {selects} blocks"
    plans = step_run.plans_of(kernels, case, inputs)
    assert (plans[0] is plans[1]) == (selects == CHOOSE)
    result = step_run.result_of(case, plans[0], step_run.step_calls(kernels, case, plans, inputs)[0]())
    promise = step_run.our_promise(LEVELS, "sm_90a")
    assert step_run.step_problem(LEVELS, case, inputs[0], result, promise) == ""
    spoilt = {
        "scores are off": replace(result, scores=result.scores + 1000),
        "not the top-k of the scores": replace(result, ids=result.ids.flip(0)),
        "elements off": replace(result, out=result.out * 1.1),
    }
    text = {CHOOSE: "blocks are not the best", USE: "scores are off"}[selects]
    spoilt[f".*{text}"] = replace(result, blocks=result.blocks.flip(0))
    for text, wrong in spoilt.items():
        assert re.search(text, step_run.step_problem(LEVELS, case, inputs[0], wrong, promise))


def test_cases_are_those_of_each_kind_of_layer():
    cases = step_cases(LEVELS)
    assert [case.selects for case in cases] == [None, CHOOSE, USE] * 3 and len(step_cases(V41)) == 3
    every, choose, use = cases[-3:]
    assert every.read_bytes == choose.read_bytes == 128 * (131072 * 68 + 512 * 288 + 128 * 528)
    assert use.read_bytes == 128 * (2048 * 8 * 68 + 512 * 288 + 128 * 528) and use.score_flops * 8 == every.score_flops
    assert (choose.to_json()["selects"], use.to_json()["candidate_blocks"]) == (CHOOSE, 2048)
    assert "selects" not in every.to_json()


# ---- the sweep


def test_the_sweep_measures_all_of_a_spec_or_one_op(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(run, "sweep_decode", lambda specs, **_: asked.extend("sparse_decode" for _ in specs) or [])
    monkeypatch.setattr(topk_run, "sweep_topk", lambda *_, **__: asked.append("topk") or [])
    monkeypatch.setattr(logits_run, "sweep_logits", lambda *_, **__: asked.append("indexer_logits") or [])
    monkeypatch.setattr(step_run, "sweep_steps", lambda *_, **__: asked.append("decode_step") or [])
    every = ["sparse_decode", "topk", "indexer_logits", "decode_step"]
    for only, want in ((None, every), *((op, [op]) for op in every)):
        asked.clear()
        sweep.run_sweep([SPEC], only=only)
        assert asked == want
    asked.clear()
    sweep.run_sweep([SPEC], axes=SweepAxes(batch=(3,)))
    assert asked == ["sparse_decode"]
    # Steps over keys in other forms are told, and the ops of such a spec are measured.
    said: list[str] = []
    other = SPEC.replace(index={**SPEC.to_mapping()["index"], "forms": ["ragged"]})
    sweep.run_sweep([other], progress=said.append)
    assert asked[1:] == every[:-1] and "steps are measured with index keys in pages only" in said[-1]
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
    found = step_run.sweep_steps(
        SPEC, with_peers=False, seed=0, records=records, progress=said.append, wrong=told.append
    )
    assert [(f.case.requests, f.record_us) for f in found] == [(1, None), (128, 99.0)]
    assert told == ["is wrong"] and len(said) == 2


# ---- chains of other libraries, on stand-ins for them

LIBRARIES = {
    "deep_gemm/__init__.py": """
        from dsagen.families.indexer_logits.reference import logits_reference
        from dsagen.index_format import index_format
        __version__ = "0.1.4.post1"
        class Foreign:
            def __init__(self, tensor):
                self.tensor = tensor
            def __dlpack__(self, **options):
                return self.tensor.__dlpack__(**options)
            def __dlpack_device__(self):
                return self.tensor.__dlpack_device__()
        def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
            return (block_kv, num_sms)
        def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, most, clean_logits):
            assert schedule_meta == (64, 132) and not clean_logits
            scores = logits_reference(q, kv_cache, weights, context_lens, block_table, index_format("fp8"), most)[0]
            return Foreign(scores.float())
    """,
    "sglang/__init__.py": "__version__ = '0.5.23'",
    "sglang/kernels/ops/attention/dsv4/topk.py": """
        import torch
        worst = False
        def plan_topk_v2(seq_lens):
            return ("plan", seq_lens)
        def topk_transform_paged_v2(scores, seq_lens, page_tables, out, page_size, metadata):
            assert metadata[0] == "plan" and metadata[1] is seq_lens and page_tables.shape[0] == scores.shape[0]
            ids = torch.topk(scores, out.shape[1], largest=not worst).indices
            out.copy_(page_tables.gather(1, ids // page_size) * page_size + ids % page_size)
    """,
    "flash_mla/__init__.py": """
        import math
        import torch
        from dsagen.families.sparse_decode.reference import sparse_decode_reference
        from dsagen.kv_format import kv_format
        __version__ = "1.0.0"
        def get_mla_metadata():
            return object(), None
        def flash_mla_with_kvcache(q, k_cache, indices, softmax_scale, **_):
            found = sparse_decode_reference(
                q, kv_format("v32"), k_cache.view(torch.uint8), indices, sm_scale=softmax_scale
            )
            b, s, h, _ = q.shape
            return found.out.view(b, s, h, -1).bfloat16(), found.lse.view(b, s, h).transpose(1, 2).float()
    """,
}
CHAINED = replace(CASE, index_heads=32, requests=2, next_n=2, context=192, selected=64)
NAME = "deep_gemm + sglang-topk-v2 + sgl-flash-mla"


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    ours = {path.split("/")[0] for path in LIBRARIES}

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in ours]:
            del sys.modules[name]

    forget()
    for path, text in LIBRARIES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    monkeypatch.setenv("DSAGEN_PEER_SITE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(step_run, "graph_time_us", lambda calls: Timing(50.0, 0.02, len([call() for call in calls]), 9))
    yield
    forget()


def test_a_chain_of_libraries_is_verified_and_timed_as_one_step(libraries):
    assert [peer.name for peer in step_run.STEP_PEERS] == [NAME, NAME.replace("sgl-flash-mla", "flashinfer-fa3")]
    inputs, peer = step_inputs(CHAINED, make_pools(CHAINED, 3, device="cpu"), 2), step_run.STEP_PEERS[0]
    found = step_run.measure_step_peer(peer, SPEC, CHAINED, inputs)
    label = f"{NAME}, heads padded to 64"
    assert found == PeerFigure(NAME, label, "0.1.4.post1 + 0.5.23 + 1.0.0", 50.0)
    sys.modules["sglang.kernels.ops.attention.dsv4.topk"].worst = True
    wrong = step_run.measure_step_peer(peer, SPEC, CHAINED, inputs)
    assert wrong.gpu_us is None and "wrong: row 0 does not hold torch.topk's values" in wrong.note


def test_a_chain_refuses_what_one_of_its_libraries_does_and_may_lack_one(libraries):
    peer = step_run.STEP_PEERS[0]
    for change, text in (
        ({"index_heads": 16}, "deep_gemm has 32 and 64 heads, not 16"),
        ({"requests": 128}, "sglang-topk-v2 gives ids of at most 128 tokens, not of 256"),
        ({"selected": 65}, "sgl-flash-mla needs a top-k that is a multiple of 64, not 65"),
    ):
        assert text in step_run.measure_step_peer(peer, SPEC, replace(CHAINED, **change), []).note
    inputs = step_inputs(CHAINED, make_pools(CHAINED, 3, device="cpu"), 1)
    missing = step_run.measure_step_peer(step_run.STEP_PEERS[1], SPEC, CHAINED, inputs)
    assert missing.gpu_us is None and "flashinfer" in missing.note


def test_the_sweep_measures_chains_where_it_is_asked_for_them(monkeypatch):
    monkeypatch.setattr(dsagen, "load", lambda spec: SimpleNamespace(spec=spec, prepare=lambda: None, device="cpu"))
    copies: list[bool] = []
    monkeypatch.setattr(step_run, "make_pools", lambda *_, with_bf16, **__: copies.append(with_bf16))
    monkeypatch.setattr(step_run, "step_inputs", lambda *_, **__: [])
    monkeypatch.setattr(step_run, "measure_step", lambda kernels, case, inputs: replace(FIGURES, case=case))
    figure = PeerFigure("a", "a", "1", 3.0)
    monkeypatch.setattr(step_run, "measure_step_peer", lambda *_: figure)
    for asked in (False, True):
        found = sweep.run_sweep([SPEC], with_peers=asked, only="decode_step")
        assert [f.peers for f in found] == [(figure, figure) if asked else ()] * 3
    assert copies == [False, True]
