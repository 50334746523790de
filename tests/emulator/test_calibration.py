"""The emulator beside what devices gave for the cases of tests/emulator/calibration, where a record of one is kept."""

from __future__ import annotations

import ctypes
import enum
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from calibration import boxes, children, maps
from calibration.__main__ import compare, main
from calibration.boxes import TRIES, UNTOUCHED
from calibration.case import Case
from calibration.children import MAPS, Outcome, child_command, compile_all, cubin_of, run_in_children, serve
from calibration.device import Arguments, Device
from calibration.records import cases, disagreements, golden_records, not_recorded, packed, unpacked

from dsagen.build import find_toolchain
from dsagen.errors import DeviceError, EmulatorError, GuardError
from dsagen.tensor_map import TensorMap

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
    written = json.loads(out.read_text())
    taken = {case.name: case for case in cases() if not case.refused}
    declined = [case.name for case in cases() if case.refused]
    assert f"{len(taken)} cases of emulator" in capsys.readouterr().out
    assert (written["device"], set(written["cases"]), set(written["failed"])) == ("emulator", set(taken), set(declined))
    assert compare(str(out)) == 0
    assert "0 disagreements" in capsys.readouterr().out
    # Each kind of disagreement is told.
    stale, failed, other = (name for name in ("redux", "tensor.load.2d", "bulk.reduce.add.f32"))
    written["cases"][stale]["key"] = "0"
    written["failed"][failed] = {"key": written["cases"].pop(failed)["key"], "error": "illegal address"}
    written["cases"][other]["data"] = packed(taken[other], taken[other].run_emulated() + 1)["data"]
    written["maps"]["swizzle"] = {"driver": "error 1", "ours": "00", "agree": False}
    assert not_recorded(written) == [stale]
    assert [text.split(":")[0] for text in sorted(disagreements(written))] == [other, "tensor map swizzle", failed]
    # A model is of devices only.
    name = "wgmma.sums.far"
    alone = {"device": "some", "cases": {name: written["cases"][name]}, "failed": {}, "maps": {}}
    assert [text.split(":")[0] for text in disagreements(alone)] == [f"{name}'s model"]


# ---- tensor copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.name.startswith("tensor.load.") and not case.refused],
    ids=lambda case: case.name,
)  # fmt: skip
def test_bytes_of_a_box_complete_a_phase_and_lie_in_the_tile_alone(case: Case) -> None:
    assert case.tiled is not None
    found = case.run_emulated()
    words = case.tiled.of(case.inputs[0], 1 << 20).box_bytes // 4
    assert (found[:, :32] == 1).all()
    assert (found[:, 32 + words :] == UNTOUCHED).all()
    assert (found[:, 32 : 32 + words] != UNTOUCHED).all()


def test_a_box_that_announces_more_than_comes_is_told() -> None:
    """What a device would do where it counted fewer bytes than a whole box; the emulator finds it behind the wait."""
    case = next(case for case in cases() if case.name == "tensor.load.1d")
    text = case.ptx.replace("[%r10], 64;", "[%r10], 80;")
    assert text != case.ptx
    out = replace(case, ptx=text.replace(f"{TRIES};", "3;")).run_emulated
    with pytest.raises(EmulatorError, match=r"race: read of shared bytes \d+ to \d+, which .* copied asynchronously"):
        out()


# ---- what a device's record takes -----------------------------------------------------------------------------------


def test_arguments_lie_as_the_driver_reads_them() -> None:
    arguments = Arguments([0x1234567890, 7], bytes(range(128)))
    pointers = (ctypes.c_void_p * 3).from_address(arguments.address)
    assert [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, (128, 8, 8), strict=True)] == [
        bytes(range(128)), (0x1234567890).to_bytes(8, "little"), (7).to_bytes(8, "little"),
    ]  # fmt: skip


class FakeCuda:
    """cuda.bindings.driver with the emulator for a device: reads arguments and memory from where the driver would."""

    CUlaunchConfig = SimpleNamespace

    def __init__(self, case: Case) -> None:
        self.case, self.memory = case, dict[int, np.ndarray]()
        self.CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster")
        self.launches: list[tuple[int, int, int]] = []
        self.called: list[str] = []
        self.result = FakeResult.SUCCESS

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        def call(*arguments: object) -> tuple[object, ...]:
            self.called.append(name)
            return (self.result, getattr(self, f"on_{name}", lambda *_: f"of {name}")(*arguments))

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def on_cuMemAlloc(self, size: int) -> int:
        made = np.empty(size, np.uint8)
        self.memory[made.ctypes.data] = made
        return made.ctypes.data

    def on_cuMemcpyHtoD(self, to: int, source: int, size: int) -> None:
        self.memory[to][:] = np.frombuffer(ctypes.string_at(source, size), np.uint8)

    def on_cuMemcpyDtoH(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def on_cuMemFree(self, place: int) -> None:
        del self.memory[place]

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def on_cuLaunchKernelEx(self, launch: Any, kernel: str, params: int, extra: int) -> None:
        assert kernel == "of cuKernelGetFunction" and launch.gridDimY == launch.blockDimZ == 1
        cluster = launch.attrs[0].value.clusterDim.x if hasattr(launch, "attrs") else 1
        self.launches.append((launch.gridDimX, launch.blockDimX, cluster))
        first = self.case.tiled is not None
        arrays = self.case.arrays()
        pointers = (ctypes.c_void_p * (len(arrays) + first)).from_address(params)
        if first:
            assert ctypes.string_at(pointers[0], 128) == bytes(range(128))
        for pointer, place, array in zip(pointers[first:], self.memory, arrays, strict=True):
            assert ctypes.c_uint64.from_address(pointer or 0).value == place
            assert self.memory[place].tobytes() == array.tobytes()
        self.memory[place][:] = self.case.run_emulated().reshape(-1).view(np.uint8)


class FakeResult(enum.IntEnum):
    SUCCESS = 0
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715


@pytest.mark.parametrize("name", ["tensor.reduce.add.float16", "bulk.multicast4.101.from3", "cvt.f32.f16"])
def test_a_case_is_launched_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases() if case.name == name)
    cuda = FakeCuda(case)
    monkeypatch.setattr(TensorMap, "encode", lambda tensor_map, module: bytes(range(128)))
    machine = Device(0, cuda)
    assert cuda.called[-1] == "cuCtxSetCurrent"
    found = machine.run(case, b"")
    assert found.shape == case.shape and case.difference(found, case.run_emulated()) == ""
    assert cuda.launches == [(case.grid, case.threads, case.cluster)]
    assert not cuda.memory and machine.is_usable()
    cuda.result = FakeResult.CUDA_ERROR_ILLEGAL_INSTRUCTION
    with pytest.raises(DeviceError, match="cuLibraryLoadData: CUDA_ERROR_ILLEGAL_INSTRUCTION"):
        machine.run(case, b"")
    assert not machine.is_usable()


def test_a_child_does_not_wait_for_torch() -> None:
    """Whose import takes longer than all else that a child does."""
    text = "import sys; sys.path.insert(0, 'tests/emulator'); import calibration.children, dsagen.tensor_map"
    text += "; from cuda.bindings import driver; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parents[2])


# A child that fails at some tasks in each of the ways that there are.
CHILD = """
import json, os, sys
def say(**message): print(json.dumps(message), flush=True)
tasks = json.load(sys.stdin)
print("a library's own words", flush=True)
say(about={"device": "x"})
for name in tasks:
    say(begin=name)
    if name == "dies":
        sys.stderr.write("segmentation fault"); sys.stderr.flush(); os._exit(3)
    if name == "faults":
        say(case=name, error="illegal address")
        sys.exit(0)
    say(case=name, row={"of": name, "by": os.getpid()})
"""


def test_what_fails_in_a_child_stops_nothing_else() -> None:
    names = ["a", "dies", "b", "faults", "c", "d"]
    outcome = Outcome()
    run_in_children([sys.executable, "-c", CHILD], dict.fromkeys(names, ""), outcome)
    assert set(outcome.rows) == set("abcd")
    assert len({row["by"] for row in outcome.rows.values()}) == 3
    assert outcome.failed == {
        "dies": "the child ended with code 3: segmentation fault", "faults": "illegal address",
    }  # fmt: skip
    assert outcome.about == {"device": "x"}


@pytest.mark.parametrize("end", ["dies", "faults"])
def test_what_is_like_a_case_that_faults_comes_last(end: str) -> None:
    """Whether the child tells of the fault itself, or is gone."""
    names = ["tensor.load.a", f"tensor.load.{end}", "tensor.load.b", "tensor.load2.c", "tensor.store.d", "wgmma.e"]
    outcome = Outcome()
    child = CHILD.replace('name == "', 'name.split(".")[-1] == "')
    run_in_children([sys.executable, "-c", child], dict.fromkeys(names, ""), outcome)
    assert list(outcome.rows) == ["tensor.load.a", "tensor.store.d", "wgmma.e", "tensor.load.b", "tensor.load2.c"]
    assert list(outcome.failed) == [f"tensor.load.{end}"]


def test_at_the_deadline_what_is_done_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome()
    # It comes once the first case is done, however busy the machine is.
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if outcome.rows else 0.0)
    monkeypatch.setattr(children, "time", clock)
    slow = "    if name == 'slow': import time; time.sleep(600)\n"
    child = CHILD.replace("    say(case=name, row", slow + "    say(case=name, row")
    run_in_children([sys.executable, "-c", child], dict.fromkeys(["a", "slow", "b"], ""), outcome, deadline=900.0)
    assert set(outcome.rows) == {"a"}
    assert outcome.failed["slow"] in ("the time was up", "not begun: the time is up")
    assert outcome.failed["b"] == "not begun: the time is up"


def test_children_that_never_begin_are_given_up() -> None:
    outcome = Outcome()
    run_in_children([sys.executable, "-c", "raise SystemExit('no driver')"], {"a": "", "b": ""}, outcome)
    assert outcome.failed == dict.fromkeys("ab", "not begun: the child ended with code 1: no driver")


def test_children_are_not_started_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MOST_CHILDREN", 2)
    outcome = Outcome()
    run_in_children(
        [sys.executable, "-c", CHILD.replace("dies", "d")], dict.fromkeys(["d", "a", "faults", "b"], ""), outcome
    )
    assert set(outcome.rows) == {"a"}
    assert outcome.failed["b"] == "not begun: 2 children have ended on the way"


def test_a_child_that_says_nothing_is_ended() -> None:
    outcome = Outcome()
    run_in_children([sys.executable, "-c", "import time; time.sleep(600)"], {"a": ""}, outcome, patience=0.2)
    assert outcome.failed["a"].startswith("not begun: nothing came for 0.2 s")


def test_a_child_does_what_it_is_given() -> None:
    declined = next(case for case in cases() if case.refused)
    taken = [case for case in cases() if case.name in ("cluster2.addresses", "tensor.load.3d")]
    tasks, answers = {case.name: "" for case in (taken[0], declined, taken[1])}, io.StringIO()
    serve("emulator", io.StringIO(json.dumps({**tasks, MAPS: ""})), answers)
    said = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [message["begin"] for message in said if "begin" in message] == [*tasks, MAPS]
    found = {message["case"]: message for message in said if "case" in message}
    assert declined.refused in found[declined.name]["error"]
    for case in taken:
        assert case.difference(case.run_emulated(), unpacked(found[case.name]["row"])) == ""
    # By the command that a record is made with.
    outcome = Outcome()
    run_in_children(child_command("emulator"), {MAPS: ""}, outcome)
    assert (outcome.about["device"], outcome.failed) == ("emulator", {})


class FakeLibrary:
    """A driver's library that takes every description, or none."""

    def __init__(self, error: int) -> None:
        self.error, self.calls = error, 0

    def cuTensorMapEncodeTiled(self, to: ctypes.c_void_p, *arguments: object) -> int:
        self.calls += 1
        assert to.value is not None and to.value % 64 == 0 and len(arguments) == 11
        ctypes.memmove(to.value, bytes(range(128)), 128)
        return self.error


def test_both_ways_to_a_tensor_map_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "encoded_by_us", lambda cuda, fields: bytes(range(128)))
    library = FakeLibrary(0)
    rows = maps.survey(library, None)  # type: ignore[arg-type]
    assert library.calls == len(rows) == len(boxes.descriptions())
    assert all(row["agree"] and row["driver"] == row["ours"] == bytes(range(128)).hex() for row in rows.values())
    rows = maps.survey(FakeLibrary(1), None)  # type: ignore[arg-type]
    assert not any(row["agree"] for row in rows.values())
    assert rows["plain"]["driver"] == "error 1"
    # Of a context that is missing both complain, which says nothing of a map.
    monkeypatch.setattr(maps, "encoded_by_us", lambda cuda, fields: "no context")
    assert all(row["agree"] for row in maps.survey(FakeLibrary(1), None).values())  # type: ignore[arg-type]
    assert not any(row["agree"] for row in maps.survey(FakeLibrary(201), None).values())  # type: ignore[arg-type]
    monkeypatch.undo()
    # What we refuse ourselves needs no driver to say so.
    refused = {name for name, fields in boxes.descriptions().items() if isinstance(ours(fields), str)}
    assert {name for name in refused if not name.endswith((".over", ".none"))} == {
        "address", "stride.unit", "box.row", "nan.integer",
    }  # fmt: skip


def ours(fields: dict[str, object]) -> TensorMap | str:
    try:
        return boxes.described(fields)
    except GuardError as error:
        return str(error)


# Of the cases, one in so many is assembled, which takes a tenth of a second each.
PART = 7


@pytest.mark.compile
@pytest.mark.parametrize("case", cases()[::PART], ids=lambda case: case.name)
def test_ptxas_takes_a_case(case: Case) -> None:
    assert cubin_of(case, find_toolchain())[:4] == b"\x7fELF"


@pytest.mark.compile
def test_a_case_that_does_not_compile_is_told(tmp_path: Path) -> None:
    good = cases()[0]
    bad = replace(good, name="bad", ptx=good.ptx.replace("ret;", "no.such;"))
    files, failed = compile_all([bad, good], find_toolchain(), tmp_path)
    assert list(files) == [good.name]
    assert failed["bad"].startswith("does not compile: ")


@pytest.mark.parametrize("name", RECORDS or ["none"])
def test_the_emulator_gives_what_a_device_gave(name: str) -> None:
    if not RECORDS:
        pytest.skip("no recorded device: nothing is calibrated (python -m tests.emulator.calibration 0 FILE)")
    assert disagreements(RECORDS[name]) == []
    # What has been added or changed since is to be asked before long.
    assert len(not_recorded(RECORDS[name])) < len(cases()) / 10
