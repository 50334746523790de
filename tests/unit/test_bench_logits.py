"""The benchmark of the indexer's logits on a CPU: cases, goals, verification, a peer's stand-in, the sweep."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.arch import H200
from dsagen.bench import logits_run, sweep
from dsagen.bench.cases import logits_cases
from dsagen.bench.figures import PeerFigure, case_key
from dsagen.bench.logits_data import LogitsBenchCase, logits_inputs
from dsagen.bench.logits_figures import GOAL_DEVICE, GOALS_US, LogitsFigures
from dsagen.bench.logits_peers import LOGITS_PEERS, DeepGemm
from dsagen.bench.timing import Timing
from dsagen.errors import CheckFailed, SpecError
from dsagen.families.indexer_logits.reference import logits_reference, ragged_reference
from dsagen.index_format import index_format
from dsagen.matrix import expand
from dsagen.spec import load_spec

SPEC, RAGGED, MX = (load_spec(n) for n in ("v32_indexer_h128", "v32_indexer_ragged_h128", "v4_indexer_h64"))
CASE = LogitsBenchCase("paged", "fp8", 64, 128, "fp32", 128, 1, 32 << 10)
SMALL = LogitsBenchCase("paged", "fp8", 8, 32, "fp32", 3, 2, 64, page_size=16)
PROMPT = LogitsBenchCase("ragged", "mxfp4", 8, 32, "fp32", 1, 5, 64)
FIGURES = LogitsFigures("v32_indexer_h128", ("s",), GOAL_DEVICE, "sm_90a", 140.0, 0.01, 2, 9.0, 141.0, 126.0, CASE)


def test_the_cases_hold_every_goal():
    cases = [*logits_cases(SPEC), *logits_cases(RAGGED)]
    shapes = {(case.form, case.heads, case.batch, case.next_n, case.kv_tokens) for case in cases}
    assert set(GOALS_US) <= shapes and len(set(cases)) == len(cases)
    assert {case.form for case in logits_cases(MX)} == {"paged", "ragged"}
    assert {case.compressed for case in logits_cases(RAGGED)} == {True, False}


def test_bytes_and_products_of_a_case():
    assert (CASE.pairs, CASE.read_bytes, CASE.write_bytes) == (128 << 15, 128 * 32768 * 132, 128 * 32768 * 4)
    assert CASE.flops == 2 * 128 * 32768 * 64 * 128
    # Token t of 5 sees 60 + t keys.
    assert PROMPT.pairs == 60 + 61 + 62 + 63 + 64 and PROMPT.read_bytes == 64 * (16 + 4)
    assert logits_run.logits_floor_us(CASE, H200) == pytest.approx(128 * 32768 * 136 / 4.53e12 * 1e6)
    two = replace(CASE, heads=128, next_n=4)
    assert logits_run.logits_floor_us(two, H200) == pytest.approx(two.flops / (2 * 797e12) * 1e6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"kv_tokens": 100}, "kv_tokens 100 do not fill pages of 64"),
        ({"form": "ragged"}, "ragged case of 128 requests"),
    ],
)
def test_a_case_that_cannot_be_drawn_is_refused(change, text):
    with pytest.raises(SpecError, match=text):
        replace(CASE, **change)


def test_figures_are_plain_data_and_a_row():
    document = json.loads(json.dumps(FIGURES.to_json(), allow_nan=False))
    assert document["goals_us"] == [144.0, 138.0] and document["missed"] == []
    assert len(FIGURES.cells()) == len(FIGURES.header) and FIGURES.measured_spec(SPEC) is SPEC
    assert FIGURES.title == "paged fp8, 64 heads, 128 x 1 over 32768"
    assert replace(FIGURES, gpu_us=150.0).missed == ("150.0 us, goal 144.0 us",)
    assert replace(FIGURES, device="NVIDIA H100").goals_us is None
    assert replace(FIGURES, case=replace(CASE, keys="mxfp8")).goals_us is None
    assert replace(FIGURES, record_us=100.0).slower and not FIGURES.slower
    (plan,) = expand(SPEC).plans()
    assert replace(FIGURES, slugs=(plan.slug,)).took_part(plan) and not FIGURES.took_part(plan)


class ReferenceKernels:
    """Answers with the reference; `spoil` changes the scores."""

    device = torch.device("cpu")

    def __init__(self, spec, spoil=lambda scores: scores):
        self.spec, self.spoil, self.heads = spec, spoil, []

    def prepare(self):
        self.prepared = True

    def logits_slugs(self, form):
        return (f"{form} kernel",)

    def indexer_logits(self, q, k_cache, weights, context_lens, block_table, *, out, q_scales=None):
        self.heads.append(q.shape[2])
        record = index_format(self.spec.index.keys)
        given = (q, k_cache, weights, context_lens, block_table, record, out.shape[1])
        return out.copy_(self.spoil(logits_reference(*given, q_scales=q_scales)[0]))

    def indexer_logits_ragged(self, q, keys, key_scales, weights, starts, ends, *, out, max_window, q_scales=None):
        self.heads.append(q.shape[1])
        record = index_format(self.spec.index.keys)
        given = (q, keys, key_scales, weights, starts, ends, record, max_window)
        return out.copy_(self.spoil(ragged_reference(*given, q_scales=q_scales)[0]))


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("deep_gemm", None)
    yield
    sys.modules.pop("deep_gemm", None)


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Timing that runs every call eagerly and in a "capture", and gives a fixed time."""
    capturing = [False]

    def graph_time_us(calls):
        for capturing[0] in (False, True):
            for call in calls:
                call()
        capturing[0] = False
        return Timing(50.0, 0.02, len(calls), 9)

    monkeypatch.delenv("DSAGEN_PEER_SITE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(logits_run, "graph_time_us", graph_time_us)
    monkeypatch.setattr(logits_run, "eager_cost_us", lambda calls: (4.0, 51.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)


@pytest.mark.parametrize("keys", ["fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(
    "case", [SMALL, PROMPT, replace(PROMPT, compressed=True)], ids=["paged", "ragged", "compressed"]
)
def test_right_scores_are_figures_and_wrong_ones_are_not(case, keys):
    case = replace(case, keys=keys)
    spec = SPEC.replace(index={"heads": 8, "dim": 32, "keys": keys, "forms": ["paged", "ragged"]})
    inputs = logits_inputs(case, 2, device="cpu")
    found = logits_run.measure_logits(ReferenceKernels(spec), case, inputs)
    assert (found.gpu_us, found.slugs, found.input_sets) == (50.0, (f"{case.form} kernel",), 2)
    for spoil in (lambda s: s * 1.001, lambda s: s.roll(1, 1), torch.zeros_like, lambda s: s * torch.nan):
        with pytest.raises(CheckFailed, match=r"input set 0: scores\[\d+, \d+\] = "):
            logits_run.measure_logits(ReferenceKernels(spec, spoil), case, inputs)


def test_sums_of_fewer_bits_pass_where_the_kernel_that_runs_has_them():
    inputs = logits_inputs(SMALL, 1, device="cpu")

    def kernels(accumulation):
        spec = SPEC.replace(index={**SPEC.to_mapping()["index"], "accumulation": accumulation})
        return ReferenceKernels(spec, lambda scores: scores * (1 + 2.0**-12))

    with pytest.raises(CheckFailed, match=r"scores\[\d+, \d+\] = "):
        logits_run.measure_logits(kernels("fp32"), SMALL, inputs)
    assert logits_run.measure_logits(kernels("fast"), SMALL, inputs).gpu_us == 50.0


def test_scores_in_bf16_may_be_rounded():
    case = replace(SMALL, score="bf16")
    kernels = ReferenceKernels(SPEC.replace(scores="bf16"))
    assert logits_run.measure_logits(kernels, case, logits_inputs(case, 1, device="cpu")).gpu_us == 50.0


def test_what_only_an_eager_call_wrote_does_not_pass():
    (item,) = logits_inputs(SMALL, 1, device="cpu")
    kernels, made = ReferenceKernels(SPEC), []
    (call,) = logits_run.our_calls(kernels, SMALL, [item])

    def writes_once():
        made.append(made[0] if made else call())
        return made[0]

    _, problem = logits_run.timed_and_verified(SMALL, [item], [writes_once], 1e-3)
    assert problem.startswith("input set 0: scores[0, 0] = nan")


# ---- the peer, on a stand-in for its library

LIBRARY = """
    import torch
    from dsagen.families.indexer_logits.reference import logits_reference, ragged_reference
    from dsagen.index_format import index_format
    __version__ = "0.1.4.post1"
    def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
        return (context_lens, block_kv, num_sms)
    def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, most, clean_logits):
        assert schedule_meta[1:] == (64, 132) and context_lens.dim() == 2 and not clean_logits
        given = (q, kv_cache, weights, context_lens, block_table, index_format("fp8"), most)
        return logits_reference(*given)[0].float()
    def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits, max_seqlen_k=0):
        return ragged_reference(q, *kv, weights, ks, ke, index_format("fp8"), max_seqlen_k or None)[0].float()
"""


@pytest.mark.parametrize("form", ["paged", "ragged", "compressed"])
def test_the_peer_is_called_timed_and_verified(form, monkeypatch, tmp_path):
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.setenv("DSAGEN_PEER_SITE", str(tmp_path))
    shape = {
        "heads": 32,
        "dim": 32,
        "keys": "fp8",
        "kv_tokens": 64,
        "page_size": 64,
        "compressed": form == "compressed",
    }
    case = replace(SMALL if form == "paged" else PROMPT, **shape)
    found = logits_run.measure_logits_peer(LOGITS_PEERS[0], case, logits_inputs(case, 2, device="cpu"))
    assert found == PeerFigure("deep_gemm", "deep_gemm", "0.1.4.post1", 50.0)


def test_the_peer_refuses_what_it_cannot_run_and_may_be_missing():
    peer = DeepGemm()
    assert peer.refuses(CASE) is None and peer.refuses(replace(CASE, batch=1, form="ragged", next_n=9)) is None
    for change in ({"keys": "mxfp8"}, {"score": "bf16"}, {"heads": 16}, {"next_n": 3}, {"page_size": 32}):
        assert peer.refuses(replace(CASE, **change))
    case = replace(SMALL, heads=32, page_size=64)
    missing = logits_run.measure_logits_peer(peer, case, logits_inputs(case, 1, device="cpu"))
    assert missing.gpu_us is None and "sgl-deep-gemm" in missing.note


def test_the_sweep_measures_each_form_with_its_heads(monkeypatch):
    made = []
    monkeypatch.setattr(dsagen, "load", lambda spec: made.append(ReferenceKernels(spec)) or made[-1], raising=False)
    cases = [SMALL, replace(PROMPT, keys="fp8", heads=16)]
    monkeypatch.setattr(logits_run, "logits_cases", lambda spec: cases)
    monkeypatch.setattr(logits_run, "input_sets_for", lambda _, most: 2)
    spec = SPEC.replace(index={"heads": 8, "dim": 32, "keys": "fp8", "forms": ["paged", "ragged"]})
    figures = sweep.run_sweep([spec], records={case_key(asdict(SMALL)): 40.0})
    assert [(f.case, f.gpu_us, f.spec) for f in figures] == [(case, 50.0, SPEC.name) for case in cases]
    assert [f.record_us for f in figures] == [40.0, None] and all(kernels.prepared for kernels in made)
    assert [(kernels.spec.index.heads, set(kernels.heads)) for kernels in made] == [(8, {8}), (16, {16})]
