"""The benchmark of the caches' writers and readers without a device: cases, verification, figures."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.arch import H200
from dsagen.bench import cache_run, sweep
from dsagen.bench.cache_figures import CacheBenchCase, CacheFigures
from dsagen.bench.cache_run import ROWS, cache_cases, measure_cache, sweep_caches
from dsagen.bench.timing import Timing
from dsagen.cli.page import _case_name
from dsagen.errors import CheckFailed
from dsagen.matrix import expand
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

CASE = CacheBenchCase("kv_cache", "write", "v32", 4096)
FIGURES = CacheFigures("v32_kv_cache_h128", ("s",), "NVIDIA H200", "sm_90a", 3.0, 0.01, 9, 1, 4, 1.6, CASE, 7_405_568)


@pytest.mark.parametrize(
    ("name", "op", "calls"),
    [
        ("v32_kv_cache_h128", "kv_cache", ["write v32", "read v32"]),
        ("v41_kv_cache_h64", "kv_cache", [
            "write v41_interleaved", "read v41_interleaved", "convert v41_interleaved", "write v41_fp4_interleaved",
            "read v41_fp4_interleaved", "convert v41_fp4_interleaved",
        ]),
        ("v4_index_cache_h64", "index_cache", ["write mxfp4", "gather mxfp4"]),
    ],
)  # fmt: skip
def test_each_kernel_is_measured_at_each_size(name, op, calls):
    cases = cache_cases(load_spec(name), op)
    assert list(dict.fromkeys(f"{case.action} {case.format_id}" for case in cases)) == calls
    assert {case.rows for case in cases} == set(ROWS) and len({str(case.to_json()) for case in cases}) == len(cases)


def test_figures_are_plain_data_and_a_row():
    document = json.loads(json.dumps(FIGURES.to_json(), allow_nan=False))
    assert (document["gb_per_s"], document["case"]["cache_rows"]) == (2468.5, 4096)
    assert len(FIGURES.cells()) == len(FIGURES.header) and FIGURES.op == "kv_cache"
    assert FIGURES.floor_ratio == pytest.approx(3.0 / 1.6) and not FIGURES.slower
    assert replace(FIGURES, record_us=2.0).slower
    assert _case_name(document) == "write of 4096 rows, v32"
    # What draws other ops goes by these.
    assert not {"batch", "width", "rows"} & set(document["case"])


@pytest.fixture
def emulated(shared_store, shared_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cache_run, "input_sets_for", lambda *_, **__: 2)
    monkeypatch.setattr(cache_run, "eager_cost_us", lambda calls: (1.0, 2.0))

    def timed(calls):
        for call in calls:
            call()
        return Timing(10.0, 0.01, len(calls), 9)

    monkeypatch.setattr(cache_run, "graph_time_us", timed)
    load, options = dsagen.load, EmulatorOptions(races=False)
    monkeypatch.setattr(dsagen, "load", lambda spec: load(spec, device="emulator", emulator=options))


@pytest.mark.compile
@pytest.mark.parametrize(("name", "op"), [("v41_kv_cache_h64", "kv_cache"), ("v32_index_cache_h128", "index_cache")])
def test_calls_are_verified_and_timed(name, op, emulated, monkeypatch):
    spec, wrong = load_spec(name), []
    monkeypatch.setattr(cache_run, "ROWS", (40,))
    found = sweep_caches(spec, op, seed=1, records={}, progress=lambda _: None, wrong=wrong.append)
    assert wrong == [] and [figures.case for figures in found] == cache_cases(spec, op)
    plans = {plan.slug: plan for plan in expand(spec).plans()}
    assert {slug for figures in found for slug in figures.slugs} == set(plans)
    for figures in found:
        assert figures.floor_us == pytest.approx(figures.moved_bytes / H200.dram_read_bytes_per_second * 1e6)
        assert (figures.gpu_us, figures.input_sets, figures.device) == (10.0, 2, "NVIDIA H200")


@pytest.mark.compile
def test_a_wrong_call_is_not_timed(emulated, monkeypatch):
    kernels = dsagen.load(load_spec("v32_index_cache_h128"))
    case = CacheBenchCase("index_cache", "write", "fp8", 40)
    assert measure_cache(kernels, case, 1).moved_bytes > 40 * 132
    monkeypatch.setattr(kernels, "index_write", lambda *_: None)
    with pytest.raises(CheckFailed, match=r"v32_index_cache_h128: .*k_cache.*; it was not timed"):
        measure_cache(kernels, case, 1)


def test_the_sweep_measures_caches(monkeypatch):
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(cache_run, "sweep_caches", lambda spec, op, **_: asked.append((spec.name, op)) or [])
    sweep.run_sweep([load_spec("v32_kv_cache_h128"), load_spec("v4_index_cache_h64")])
    assert asked == [("v32_kv_cache_h128", "kv_cache"), ("v4_index_cache_h64", "index_cache")]
