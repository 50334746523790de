"""Evidence rows: what they are keyed by, what a rung is, where they may be written."""

import json
import os
from dataclasses import replace

import pytest

from dsagen import evidence
from dsagen.build import Store
from dsagen.errors import StoreError
from dsagen.evidence import (
    EMULATOR,
    EvidenceRow,
    Rung,
    code_flags,
    device_kind,
    load_evidence,
    read_rows,
    record,
    row_for,
    rung,
    shipped_folder,
)
from dsagen.matrix import expand
from dsagen.render import instruction_hash, render
from dsagen.spec import load_spec


@pytest.fixture(scope="module")
def unit():
    return render(expand(load_spec("v32_h16"), ("sm_90a",)).plans()[0])


def conformance(unit, **columns):
    defaults = {
        "device": "NVIDIA H200", "spec": "v32_h16", "toolchain": "nvcc 13.0.88", "driver": "580.1", "tier": "full",
        "passed": 10, "date": "2026-01-02T00:00:00Z",
    }  # fmt: skip
    return row_for(unit, "conformance", **{**defaults, **columns})


def test_a_comment_keeps_the_evidence_and_an_instruction_loses_it(unit):
    row = conformance(unit)
    commented = replace(unit, text="// a remark\n" + unit.text.replace("\n", "\n\n", 3) + "/* and\nanother */\n")
    changed = replace(unit, text=unit.text.replace("ex2.approx", "lg2.approx", 1))
    assert changed.text != unit.text
    assert row.matches(unit) and row.matches(commented)
    assert not row.matches(changed)
    assert not row.matches(replace(unit, arch="sm_80"))


def test_flags_that_change_code_are_part_of_the_key(unit, monkeypatch):
    row = conformance(unit)
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-lineinfo")
    assert row.matches(unit)
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "--maxrregcount=96")
    assert "--maxrregcount=96" in code_flags("sm_90a") and not row.matches(unit)
    monkeypatch.delenv("DSAGEN_EXTRA_NVCC_FLAGS")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DX")
    assert not row.matches(unit)


def test_the_hash_is_stable():
    # Pinned: should this change, every record made before is lost.
    assert instruction_hash("int  a; // x\n\n  int b; /* y */\n") == instruction_hash("int a;\nint b;\n")
    assert instruction_hash("int a;\nint b;\n") == "161638ea320daf7a"


def test_rungs_climb(unit):
    entry = type("Entry", (), {"nvcc_version": "13.0.88"})()
    assert rung(unit, ()).rung is Rung.PLANNED
    assert rung(unit, (), entry).rung is Rung.COMPILED
    emulated = conformance(unit, device=EMULATOR)
    assert rung(unit, (emulated,), entry).rung is Rung.EMULATED
    row = conformance(unit)
    status = rung(unit, (emulated, row), entry)
    assert (status.rung, status.devices, status.note) == (Rung.CONFORMANT, ("NVIDIA H200",), "")
    assert str(status) == "conformant on NVIDIA H200"
    bench = replace(row, kind="benchmark", figures={"gpu_us": 1.0})
    assert rung(unit, (row, bench), entry).rung is Rung.BENCHMARKED
    # A benchmark without conformance proves nothing.
    assert rung(unit, (bench,), entry).rung is Rung.COMPILED


def test_another_toolchain_is_said(unit):
    entry = type("Entry", (), {"nvcc_version": "12.9.86"})()
    status = rung(unit, (conformance(unit),), entry)
    assert status.rung is Rung.CONFORMANT and "nvcc 13.0.88" in status.note and "nvcc 12.9.86" in status.note


def test_the_last_check_decides(unit):
    good, bad = conformance(unit), conformance(unit, failed=1, date="2026-01-03T00:00:00Z")
    status = rung(unit, (bad, good))
    assert status.rung is Rung.PLANNED and "last check on NVIDIA H200 failed" in status.note
    assert rung(unit, (good, replace(bad, date="2026-01-01T00:00:00Z"))).rung is Rung.CONFORMANT
    assert rung(unit, (conformance(unit, passed=0, not_run=9),)).rung is Rung.PLANNED


def test_rows_round_trip_through_the_store(unit, tmp_path):
    store = Store((tmp_path,))
    rows = (conformance(unit, worst={"out_abs": 1e-4}), conformance(unit, device="NVIDIA B200"))
    written = record(rows, store=store)
    assert [path.name for path in written] == ["nvidia-h200.jsonl", "nvidia-b200.jsonl"]
    assert all(row in load_evidence(store) for row in rows)
    record(rows[:1], store=store)
    assert len(read_rows(written[0])) == 2


def test_a_chosen_file_is_written(unit, tmp_path):
    target = tmp_path / "deep" / "mine.jsonl"
    assert record((conformance(unit),), file=target) == (target,)
    assert json.loads(target.read_text())["spec"] == "v32_h16"


def test_packaged_evidence_is_read_only(unit, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "_packaged_folder", lambda: tmp_path)
    with pytest.raises(StoreError, match="read-only"):
        record((conformance(unit),), file=tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


def test_an_unwritable_file_is_named(unit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        record((conformance(unit),), file=tmp_path / "file" / "x.jsonl")


def test_a_damaged_line_is_left_out_and_logged(unit, tmp_path, caplog):
    path = tmp_path / "x.jsonl"
    line = conformance(unit).to_line()
    path.write_text(line + "{half\n" + line.replace('"kind"', '"sort"') + line.replace("conformance", "rumour") + line)
    assert len(read_rows(path)) == 2
    assert sum("no evidence row" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("date", None), ("passed", "9"), ("passed", True), ("failed", -1), ("not_run", 1.5), ("device", ["H200"]),
        ("device", "H200\x1b[31m\n"), ("toolchain", {}), ("evidence_hash", []), ("flags", [3]), ("seed", "1"),
        ("worst", 3), ("figures", None), ("kind", []),
    ],
)  # fmt: skip
def test_a_column_of_another_kind_makes_no_row(unit, tmp_path, caplog, column, value):
    path = tmp_path / "x.jsonl"
    row = json.loads(conformance(unit).to_line())
    path.write_text(json.dumps({**row, column: value}) + "\n" + json.dumps(row) + "\n")
    assert read_rows(path) == (conformance(unit),)
    assert f"{path}:1: no evidence row" in caplog.text


def test_files_that_are_no_evidence_are_logged(unit, tmp_path, caplog):
    folder = tmp_path / "evidence"
    (folder / "folder.jsonl").mkdir(parents=True)
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "bytes.jsonl").write_bytes(b"\xff\n" + conformance(unit).to_line().encode())
    (folder / "deep.jsonl").write_text("[" * 10**5)
    rows = load_evidence(Store([tmp_path]))
    assert [row for row in rows if row == conformance(unit)] == [conformance(unit)]
    for name in ("folder", "pipe", "loop", "bytes", "deep"):
        assert str(folder / f"{name}.jsonl") in caplog.text


def test_shipped_rows_are_whole():
    for path in sorted(shipped_folder().glob("*.jsonl")):
        rows = read_rows(path)
        assert len(rows) == len(path.read_text().splitlines())
        assert all(isinstance(row, EvidenceRow) and device_kind(row.device) == path.stem for row in rows)


def test_device_kinds():
    assert device_kind("NVIDIA H200") == "nvidia-h200"
    assert device_kind("///") == "unknown"
