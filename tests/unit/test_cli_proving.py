"""`dsagen check` and `dsagen bench` with stand-ins for the device: what they print, record and exit with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsagen.bench.data import DecodeCase
from dsagen.bench.figures import DecodeFigures, PeerFigure, case_key
from dsagen.bench.recording import last_times_us, record_figures, slower_lines
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.bench.topk_figures import TopkFigures
from dsagen.build import Store, build_units
from dsagen.check.report import CaseResult, CheckReport
from dsagen.cli import main
from dsagen.errors import StoreError
from dsagen.evidence import Rung, load_evidence, read_rows, rung
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.spec import load_spec

DEVICE = "NVIDIA H200"
HOST = (CaseResult("host.one", "passed"),)
RIGHT = CaseResult("peer.a", "passed", 0.1, 1e-4)
WRONG = CaseResult("ids.b", "failed", 0.1, out_abs=float("nan"), problem="row 3, head 1: 2, expected 1")
NOT_RUN = CaseResult("peer.a", "not_run", problem="no CUDA device")
ON_DEVICE = CheckReport("v32_h16", "quick", 7, DEVICE, "", (RIGHT,), HOST)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- check


@pytest.fixture
def checked(monkeypatch):
    """Replaces run_check by one that returns the given report, and keeps what it was called with."""
    calls = []

    def install(report: CheckReport) -> list:
        def run_check(spec, tier, **options):
            calls.append((spec, tier, options))
            return report

        monkeypatch.setattr("dsagen.check.run.run_check", run_check)
        return calls

    return install


def test_quiet_leaves_the_exit_code_and_errors_alone(capsys, checked):
    checked(ON_DEVICE)
    assert run(capsys, "check", "v32_h16", "--quiet") == (0, "", "")
    checked(replace(ON_DEVICE, results=(WRONG,)))
    code, out, err = run(capsys, "check", "v32_h16", "-q")
    assert (code, out) == (4, "") and err.startswith("error: ")


def test_check_passes_its_options_on_and_prints_the_table(capsys, checked, tmp_path):
    calls = checked(ON_DEVICE)
    arguments = ["--tier", "full", "--seed", "7", "--only", "peer.*", "--record", str(tmp_path / "rows.jsonl")]
    code, out, err = run(capsys, "check", "v32_h16", *arguments)
    assert (code, err) == (0, "")
    assert "1 of 1 device cases passed" in out
    (spec, tier, options) = calls[0]
    assert (spec, tier, options["seed"], options["only"]) == ("v32_h16", "full", 7, "peer.*")
    assert options["record_file"] == tmp_path / "rows.jsonl"


def test_check_of_wrong_numbers_exits_with_4(capsys, checked):
    checked(replace(ON_DEVICE, results=(RIGHT, WRONG)))
    code, out, err = run(capsys, "check", "v32_h16")
    assert code == 4
    assert "failed" in out
    assert err.startswith("error: v32_h16") and "ids.b: row 3, head 1: 2, expected 1" in err
    assert "--seed 7" in err


def test_check_as_json_prints_the_report_even_when_it_fails(capsys, checked):
    checked(replace(ON_DEVICE, results=(RIGHT, WRONG)))
    code, out, _ = run(capsys, "check", "v32_h16", "--json")
    assert code == 4
    (report,) = json.loads(out)["reports"]
    assert report["counts"] == {"passed": 1, "failed": 1, "not_run": 0}
    assert report["results"][1]["out_abs"] == "nan"


def test_check_without_a_device_is_no_pass(capsys, checked):
    checked(replace(ON_DEVICE, device=None, no_device="no CUDA device", results=(NOT_RUN,)))
    code, out, err = run(capsys, "check", "v32_h16")
    assert code == 5
    assert "0 of 1 device cases passed" in out
    assert err.startswith("error: v32_h16: 1 device case did not run: no CUDA device")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_an_unbuilt_part_is_named_first(capsys, command, no_fp4):
    code, _, err = run(capsys, command, "v41_h128")
    assert code == 2
    assert no_fp4 in err


# ---- bench

CASE = DecodeCase("v32", heads=16, batch=4, s_q=1, topk=2048, kv_tokens=32768, page_size=64)


@pytest.fixture
def figures() -> DecodeFigures:
    """A figure of the kernel that v32_h16 has on Hopper."""
    slug = expand(load_spec("v32_h16")).plans()[0].slug
    peers = (
        PeerFigure("fast", "fast, heads padded to 64", "1.0", 12.0),
        PeerFigure("absent", "absent", "", None, "failed: SpecError: cannot import absent"),
    )
    return DecodeFigures("v32_h16", slug, DEVICE, CASE, 16, 64, 9.5, 0.012, 48, 4.2, 11.0, 1.19, peers)


@pytest.fixture
def swept(monkeypatch, figures):
    """Replaces the device and the sweep."""
    seen = {}

    def run_sweep(specs, **options):
        seen.update(options, specs=specs)
        record_us = options["records"].get(case_key(figures.to_json()["case"]))
        return [replace(figures, record_us=record_us)]

    monkeypatch.setattr("dsagen.bench.sweep.run_sweep", run_sweep)
    monkeypatch.setattr("dsagen.bench.sweep.current_device_name", lambda: DEVICE)
    return seen


@pytest.fixture
def compiled_units(session_store):
    units = [render(plan) for plan in expand(load_spec("v32_h16")).plans()]
    build_units(units, Store([session_store]))
    return units


@pytest.mark.compile
@pytest.mark.usefixtures("no_evidence")
def test_bench_prints_records_and_compares(capsys, swept, figures, compiled_units, tmp_path):
    file = tmp_path / "rows.jsonl"
    code, out, _ = run(capsys, "bench", "v32_h16", "--peers", "--record", str(file))
    assert code == 0
    assert swept["with_peers"] is True
    header, row = (line.split() for line in out.splitlines()[1:3])
    assert header[:4] == ["batch", "topk", "GPU", "us"]
    cells = "4 2048 9.5 1.2% 1.2 7.98 0.57 30 64 64 16 4.2 11.0 - 12.0 -"
    assert row == cells.split()
    assert "absent: failed: SpecError: cannot import absent" in out
    assert f"recorded in {file}" in out

    rows = read_rows(file)
    assert [row.slug for row in rows] == [unit.slug for unit in compiled_units]
    assert all(row.kind == "benchmark" and row.matches(unit) for row, unit in zip(rows, compiled_units, strict=True))
    assert last_times_us(DEVICE, file) == {case_key(figures.to_json()["case"]): 9.5}
    assert last_times_us("another device", file) == {}

    code, out, _ = run(capsys, "bench", "v32_h16", "--record", str(file), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["figures"][0]["record_us"] == 9.5
    assert document["slower"] == []


@pytest.mark.compile
def test_a_kernel_that_did_not_run_gets_no_row(compiled_units, figures, tmp_path):
    unsplit = replace(figures, num_splits=1)
    record_figures(load_spec("v32_h16"), [unsplit], tmp_path / "rows.jsonl")
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert row.slug == figures.slug


@pytest.mark.compile
@pytest.mark.usefixtures("no_evidence")
def test_a_benchmark_is_in_the_store_and_no_rung_without_a_check(compiled_units, figures, session_store, tmp_path):
    store = Store([tmp_path, session_store])
    record_figures(load_spec("v32_h16"), [figures], store=store)
    status = rung(compiled_units[0], load_evidence(store), store.lookup(compiled_units[0]))
    assert status.rung is not Rung.BENCHMARKED
    assert last_times_us(DEVICE, store=store)[case_key(figures.to_json()["case"])] == 9.5


def test_figures_of_a_kernel_that_is_not_stored_are_not_recorded(figures, tmp_path, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(StoreError, match="not in the store"):
        record_figures(load_spec("v32_h16"), [figures], tmp_path / "rows.jsonl")


def test_what_got_slower_is_said(figures):
    assert slower_lines([replace(figures, record_us=9.4)]) == []
    (line,) = slower_lines([replace(figures, record_us=8.0)])
    assert line == "slower than the last record: v32_h16 batch 4, topk 2048: 9.5 us, was 8.0 us"


@pytest.fixture
def selections() -> list[TopkFigures]:
    """Figures of both dtypes of scores, the second of them late."""
    spec, found = load_spec("v32_topk_h128"), []
    for score, gpu_us in (("fp32", 15.0), ("bf16", 14.5)):
        # The kernels that rows take which blocks share; a row for each, and for no other.
        *_, count, select = expand(spec.replace(scores=score)).plans()
        case = TopkBenchCase(score, 128, 32768, 2048, "set")
        peers = (PeerFigure("torch", "torch", "2.11.0", 103.4),)
        slugs = (count.slug, select.slug)
        found.append(
            TopkFigures(spec.name, slugs, DEVICE, "sm_90a", gpu_us, 0.01, 16, 9.0, 15.5, 3.7, case, 14.0, peers=peers)
        )
    return found


@pytest.mark.compile
@pytest.mark.usefixtures("no_evidence")
def test_bench_of_both_dtypes_of_scores(capsys, monkeypatch, selections, session_store, tmp_path):
    spec, file = load_spec("v32_topk_h128"), tmp_path / "rows.jsonl"
    units = [render(plan) for score in ("fp32", "bf16") for plan in expand(spec.replace(scores=score)).plans()]
    build_units(units, Store([session_store]))
    monkeypatch.setattr("dsagen.bench.sweep.run_sweep", lambda specs, **_: selections)
    monkeypatch.setattr("dsagen.bench.sweep.current_device_name", lambda: DEVICE)
    code, out, _ = run(capsys, "bench", "v32_topk_h128", "--peers", "--record", str(file))
    assert code == 0
    title, header, fp32, bf16, missed = out.splitlines()[:5]
    assert title.endswith(f", topk on {DEVICE}") and header.split()[-1] == "torch"
    assert fp32.split() == [
        *("fp32", "128", "32768", "2048", "set", "15.0", "1.0%", "3.70", "4.05", "1.12", "16.0", "1.07"),
        *("9.0", "15.5", "-", "103.4"),
    ]
    assert bf16.split()[0] == "bf16"
    assert missed == "  missed: bf16 128 x 32768, k 2048, set: 14.5 us, goal 13.0 us"
    rows = read_rows(file)
    assert [row.slug for row in rows] == [slug for found in selections for slug in found.slugs]
    assert last_times_us(DEVICE, file) == {case_key(f.to_json()["case"]): f.gpu_us for f in selections}


def test_bench_without_a_device_exits_with_5(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, "bench", "v32_h16")
    assert (code, out) == (5, "")
    assert err.startswith("error: no CUDA device")


def test_evidence_cannot_be_recorded_where_a_folder_is(capsys, tmp_path):
    code, _, err = run(capsys, "bench", "v32_h16", "--record", str(Path(tmp_path)))
    assert code == 2
    assert "is a directory" in err
