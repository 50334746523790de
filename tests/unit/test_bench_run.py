"""The benchmark sweep on a CPU: floors, rates, what is checked before anything is timed, and notes about peers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decode_stand_ins import SMALL, ExactKernels, StandInPeer

import dsagen
from dsagen.arch import ARCHS, H200
from dsagen.bench import run
from dsagen.bench.cases import BATCHES, decode_cases
from dsagen.bench.data import DecodeCase, make_pool
from dsagen.bench.figures import DecodeFigures, PeerFigure, case_key, figures_of, floor_us
from dsagen.bench.timing import Timing
from dsagen.errors import CheckFailed
from dsagen.spec import load_spec

CASE = DecodeCase("v32", heads=16, batch=128, s_q=1, topk=2048, kv_tokens=32768, page_size=64)
FIGURES = DecodeFigures("v32_h16", "slug", "NVIDIA H200", CASE, 1, 128, 75.0, 0.01, 2, 4.0, 80.0, 40.0)


def test_cases_follow_the_spec():
    cases = decode_cases(load_spec("v32_h16"))
    assert [case.batch for case in cases] == list(BATCHES) == [1, 4, 16, 64, 128]
    assert {(case.heads, case.topk, case.s_q, case.kv_tokens, case.kv_format) for case in cases} == {
        (16, 2048, 1, 32768, "v32")
    }
    narrow = load_spec("v32_h16").replace(topk=512)
    assert {case.topk for case in decode_cases(narrow)} == {512}


def test_cases_of_two_caches_are_a_window_and_a_selection_and_the_selection_alone():
    def widths(name):
        return {case.width for case in decode_cases(load_spec(name))}

    assert widths("v41_h128") == {"128 + 512"}
    assert widths("v4_h64") == {"128 + 512", "128 + 1024", "512"}
    (case,) = [c for c in decode_cases(load_spec("v41_h128")) if c.batch == 64]
    assert case.kv_bytes == 64 * (128 * 528 + 512 * 288)
    assert case.flops == 2 * 64 * 128 * 640 * 1024


def test_a_case_without_a_second_cache_is_the_case_that_older_records_hold():
    assert CASE.to_json() == {
        "kv_format": "v32", "heads": 16, "batch": 128, "s_q": 1, "topk": 2048, "kv_tokens": 32768, "page_size": 64
    }  # fmt: skip


def test_the_floor_is_the_larger_of_reading_and_computing():
    assert floor_us(CASE, H200) == pytest.approx(128 * 2048 * 656 / 4530e9 * 1e6)
    many_heads = replace(CASE, heads=128)
    assert floor_us(many_heads, H200) == pytest.approx(2 * 128 * 128 * 2048 * (576 + 512) / 797e12 * 1e6)


def test_floors_are_for_the_measured_device_only():
    assert figures_of("NVIDIA H200", ARCHS["sm_90a"]) is H200
    assert figures_of("NVIDIA H100 80GB HBM3", ARCHS["sm_90a"]) is None
    assert figures_of("NVIDIA H200", ARCHS["sm_100a"]) is None


def test_rates_and_ratio():
    assert FIGURES.record_bytes_per_s == pytest.approx(128 * 2048 * 656 / 75e-6)
    assert FIGURES.flops_per_s == pytest.approx(CASE.flops / 75e-6)
    assert FIGURES.floor_ratio == pytest.approx(75 / 40)
    assert replace(FIGURES, floor_us=None).floor_ratio is None
    json.dumps(FIGURES.to_json(), allow_nan=False)


@pytest.mark.parametrize(("record_us", "slower"), [(None, False), (75.0, False), (72.0, False), (71.0, True)])
def test_slower_than_the_record_needs_more_than_noise(record_us, slower):
    assert replace(FIGURES, record_us=record_us).slower is slower


# ---- the sweep, with a stand-in for kernels and device


@pytest.fixture
def sweep(monkeypatch):
    """Runs the sweep on one small case with a given kernel and peers; returns (figures, kernels)."""

    def go(spec=None, error=1.0, peers=(), **options):
        spec = spec or load_spec("v32_h16")
        kernels = ExactKernels(spec, error)
        monkeypatch.setattr(dsagen, "load", lambda _: kernels, raising=False)
        monkeypatch.setattr(run, "decode_cases", lambda _: [SMALL])
        monkeypatch.setattr(run, "make_pool", lambda name, **kw: make_pool(name, 1024, **kw))
        monkeypatch.setattr(run, "input_sets_for", lambda _: 2)
        monkeypatch.setattr(run, "PEERS", peers)
        monkeypatch.setattr(run, "graph_time_us", lambda calls: Timing(50.0, 0.02, len(calls), 9))
        monkeypatch.setattr(run, "eager_cost_us", lambda calls: (4.0, 51.0))
        device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        return run.sweep_decode([spec], with_peers=bool(peers), **options), kernels

    return go


def test_a_right_kernel_is_timed(sweep):
    (found,), kernels = sweep()
    assert kernels.prepared
    assert kernels.plans == [(2, 1, 16)] * 2
    assert (found.slug, found.num_splits, found.ctas, found.gpu_us, found.input_sets) == ("the-slug", 2, 4, 50.0, 2)
    assert found.floor_us == pytest.approx(floor_us(SMALL, H200))
    assert (found.peers, found.record_us) == ((), None)


def test_a_wrong_kernel_is_not_timed(sweep):
    with pytest.raises(CheckFailed, match="was not timed"):
        sweep(error=1.05)
    found = []
    figures, _ = sweep(error=1.05, wrong=found.append)
    assert figures == [] and len(found) == 1 and "was not timed" in found[0]


def test_an_lse_in_base_2_is_checked_too(sweep):
    assert len(sweep(load_spec("v32_h16").replace(lse={"base": 2}))[0]) == 1


def test_the_last_record_is_found_by_case(sweep):
    (found,), _ = sweep(records={case_key(SMALL.to_json()): 40.0, case_key(CASE.to_json()): 1.0})
    assert (found.record_us, found.slower) == (40.0, True)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (StandInPeer(), PeerFigure("stand-in", "stand-in, padded", "1.0", 50.0)),
        (StandInPeer(refusal="needs 64 heads"), PeerFigure("stand-in", "stand-in", "", None, "needs 64 heads")),
        (
            StandInPeer(broken=True),
            PeerFigure("stand-in", "stand-in", "", None, "failed: RuntimeError: no kernel image"),
        ),
    ],
)
def test_peers_are_timed_or_noted(sweep, peer, expected):
    (found,), _ = sweep(peers=(peer,))
    assert found.peers == (expected,)


def test_a_wrong_peer_is_not_timed(sweep):
    (found,), _ = sweep(peers=(StandInPeer(error=1.2),))
    assert found.peers[0].gpu_us is None
    assert found.peers[0].note.startswith("wrong: out: ")
