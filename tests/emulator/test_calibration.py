"""The emulator beside what devices gave for the cases of tests/emulator/calibration, where a record of one is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from calibration.__main__ import cubin_of, main
from calibration.case import Case
from calibration.records import cases, golden_records, packed, unpacked

from dsagen.build import find_toolchain
from dsagen.errors import EmulatorError

RECORDS = golden_records()


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_case_runs(case: Case) -> None:
    """And gives the same again; one that is declined says why."""
    if case.refused:
        with pytest.raises(EmulatorError, match=case.refused):
            case.run_emulated()
        return
    found = case.run_emulated()
    assert found.any()
    assert case.difference(found, unpacked(json.loads(json.dumps(packed(case, found))))) == ""
    wrong = found.copy()
    wrong.reshape(-1)[7] = 3 if wrong.reshape(-1)[7] != 3 else 5
    assert case.name in case.difference(wrong, found)


def test_how_near_is_near_enough() -> None:
    def apart(within: float, of_largest: bool, found: list[float], recorded: list[float]) -> str:
        case = Case("x", "", (), (len(found),), "f4", within=within, of_largest=of_largest)
        return case.difference(np.array(found, np.float32), np.array(recorded, np.float32))

    assert apart(0.0, False, [1.0, np.nan, np.inf], [1.0, -np.nan, np.inf]) == ""
    assert apart(0.0, False, [0.0], [-0.0]) != ""
    assert apart(0.01, False, [1.001, 100.0], [1.0, 100.5]) == ""
    assert apart(0.01, False, [1.02, 100.0], [1.0, 100.0]) != ""
    assert apart(0.01, True, [1.02, 100.0], [1.0, 100.0]) == ""
    for odd in (np.nan, np.inf, -np.inf):
        assert apart(0.5, True, [odd, 1.0], [1.0, 1.0]) != ""
        assert apart(0.5, True, [1.0, 1.0], [odd, 1.0]) != ""


def test_the_runner_writes_what_the_emulator_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    assert main("emulator", str(out)) == 0
    record = json.loads(out.read_text())
    taken = {case.name: case for case in cases() if not case.refused}
    assert f"{len(taken)} cases of emulator" in capsys.readouterr().out
    assert (record["device"], set(record["cases"])) == ("emulator", set(taken))
    name, case = next(iter(taken.items()))
    assert record["cases"][name]["key"] == case.key
    assert case.difference(case.run_emulated(), unpacked(record["cases"][name])) == ""


# Of the cases, one in so many is assembled, which takes a tenth of a second each.
PART = 7


@pytest.mark.compile
@pytest.mark.parametrize("case", cases()[::PART], ids=lambda case: case.name)
def test_ptxas_takes_a_case(case: Case) -> None:
    assert cubin_of(case, find_toolchain())[:4] == b"\x7fELF"


@pytest.mark.parametrize("record", RECORDS or ["none"])
def test_the_emulator_gives_what_a_device_gave(record: str) -> None:
    if not RECORDS:
        pytest.skip("no recorded device: nothing is calibrated (python -m tests.emulator.calibration 0 FILE)")
    rows = RECORDS[record]["cases"]
    assert [case.name for case in cases() if rows.get(case.name, {}).get("key") != case.key] == []
    differences = [
        case.difference(case.run_emulated(), unpacked(rows[case.name])) for case in cases() if not case.refused
    ]
    assert [text for text in differences if text] == []
