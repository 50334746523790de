"""`dsagen emulate` and `dsagen check --device emulator`: what they ask for, print and refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsagen.check.emulate import EmulatedKernel, SeedRun
from dsagen.check.report import CaseResult, CheckReport
from dsagen.cli import main
from dsagen.emulator.counters import METRICS, Counters

COUNTERS = Counters({"alu": 12345, "fp": 6}, 4096, 7, 8, **dict.fromkeys(METRICS, 9))
RIGHT = CaseResult("page.1", "passed")
WRONG = CaseResult("page.2", "failed", problem="EmulatorError: race")
NOT_RUN = CaseResult("run.graph", "not_run", problem="needs a CUDA device")
REPORT = CheckReport("v32_h16", "quick", 11, "emulator", "", (RIGHT,), (), "sm_90a")

PTX = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry first(.param .u64 a, .param .align 8 .b8 b[24])
.maxntid 128, 2, 1
{
 .reg .b32 %r<4>;
 .shared .align 16 .b8 area[512];
 mov.u32 %r1, 1;
 BODY
 ret;
}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "emulate needs a SPEC, a PTX file or --coverage"),
        (["v32_h16", "a.ptx"], "emulate takes specs or PTX files, not both: a.ptx is a file, name it alone"),
        (["a.ptx", "--seeds", "3"], "--seeds, --seed and --only choose what runs, and nothing does: leave them out"),
        (["--coverage", "--only", "x"], "--seeds, --seed and --only choose what runs"),
        (["a.ptx", "--arch", "sm_80"], "--arch sm_80: a PTX file has the arch that it has: leave it out"),
        (["missing.ptx"], "missing.ptx: the PTX cannot be read (No such file or directory)"),
        (["v32_h16", "--arch", "sm_80"], "arch sm_80 is not among its archs"),
        (["--coverage", "--arch", "sm_9"], "unknown arch 'sm_9'"),
        (["v32_h16", "--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_what_does_not_go_together_is_told(capsys, arguments, text):
    code, out, err = run(capsys, "emulate", *arguments)
    assert code == 2 and out == ""
    assert text in err


@pytest.mark.parametrize(("content", "text"), [(b"text", "no kernel in it"), (b"\xff\xfe.entry", "it is no text")])
def test_a_file_that_is_no_ptx(capsys, tmp_path, content, text):
    path = tmp_path / "kernel.ptx"
    path.write_bytes(content)
    code, _, err = run(capsys, "emulate", str(path))
    assert code == 2 and text in err


def test_a_ptx_file_is_listed_with_what_is_not_handled(capsys, tmp_path):
    path = tmp_path / "kernel.ptx"
    path.write_text(PTX.replace("BODY", ""))
    code, out, err = run(capsys, "emulate", str(path))
    assert (code, err) == (0, "")
    assert out == ("first: 2 instructions, 32 B of arguments, 512 B of static shared memory, at most 256 threads\n")
    path.write_text(PTX.replace("BODY", "frobnicate.b32 %r1, %r2;\nfrobnicate.b32 %r1, %r2;"))
    code, out, err = run(capsys, "emulate", str(path), "--json")
    assert code == 4
    assert json.loads(out)["missing"] == {str(path): {"frobnicate.b32": 2}}
    assert err == f"error: {path}: the emulator does not handle frobnicate.b32 (2x)\n"


@pytest.fixture
def seeds(monkeypatch):
    """Replaces run_seed by one that returns reports by emulator seed, and keeps what it was called with."""
    calls = []

    def install(reports):
        def run_seed(source, arch, emulator_seed, seed, **options):
            calls.append((source, arch, emulator_seed, seed, options["measure"], options["only"]))
            kernels = (EmulatedKernel("dsa_main", 3, COUNTERS),) if options["measure"] else ()
            return SeedRun(emulator_seed, reports[emulator_seed], kernels)

        monkeypatch.setattr("dsagen.check.emulate.run_seed", run_seed)
        return calls

    return install


def test_every_order_runs_and_the_first_is_measured(capsys, seeds):
    calls = seeds([REPORT, REPORT])
    code, out, err = run(capsys, "emulate", "v32_h16", "--seeds", "2", "--seed", "11", "--only", "page.*")
    assert (code, err) == (0, "")
    assert calls == [("v32_h16", "sm_90a", n, 11, n == 0, "page.*") for n in range(2)]
    assert "emulator as sm_90a): 1 of 1 device cases passed" in out and "emulator seed 1" in out
    assert "dsa_main: 3 launches" in out and "instructions.alu" in out and "12,345" in out


def test_a_failure_names_the_order_that_replays_it(capsys, seeds):
    seeds([REPORT, replace(REPORT, results=(RIGHT, WRONG))])
    code, out, err = run(capsys, "emulate", "v32_h16", "--seeds", "2", "--json")
    assert code == 4
    runs = json.loads(out)["runs"]
    assert [found["emulator_seed"] for found in runs] == [0, 1]
    assert runs[0]["kernels"][0]["counters"]["instructions"] == {"alu": 12345, "fp": 6} and runs[1]["kernels"] == []
    replay = "DSAGEN_EMULATOR_SEED=1 dsagen check v32_h16 --device emulator --arch sm_90a --tier quick --seed 11"
    replay += " --only 'page.2'"
    assert runs[1]["replay"] == replay and f"Replay: {replay}" in err
    assert "page.2: EmulatorError: race" in err


def test_a_run_of_nothing_is_no_pass(capsys, seeds):
    seeds([replace(REPORT, results=(NOT_RUN,))])
    code, _, err = run(capsys, "emulate", "v32_h16")
    assert code == 4 and "nothing ran, so nothing is shown" in err


# ---- check --device


@pytest.fixture
def checked(monkeypatch):
    calls = []

    def install(report):
        def run_check(spec, tier, **options):
            calls.append((spec, options["device"], options["arch"]))
            return report

        monkeypatch.setattr("dsagen.check.run.run_check", run_check)
        return calls

    return install


def test_a_check_on_the_emulator_runs_every_arch(capsys, checked, tmp_path):
    spec = tmp_path / "two.yaml"
    spec.write_text("model: v32\nheads: 16\narchs: [sm_90a, sm_80]\nops: [sparse_decode]\n")
    calls = checked(REPORT)
    code, out, _ = run(capsys, "check", str(spec), "--device", "emulator")
    assert code == 0 and "on emulator as sm_90a" in out
    assert sorted(calls) == [(str(spec), "emulator", "sm_80"), (str(spec), "emulator", "sm_90a")]
    calls.clear()
    run(capsys, "check", str(spec), "--device", "emulator", "--arch", "sm_80")
    assert calls == [(str(spec), "emulator", "sm_80")]


def test_a_device_has_its_own_arch(capsys, checked):
    calls = checked(REPORT)
    code, _, err = run(capsys, "check", "v32_h16", "--arch", "sm_90a")
    assert (code, calls) == (2, [])
    assert "--arch sm_90a: a device has the arch that it has: add --device emulator" in err
    run(capsys, "check", "v32_h16", "--device", "cuda:1")
    assert calls == [("v32_h16", "cuda:1", None)]


def test_a_check_in_which_nothing_ran_is_no_pass(capsys, checked):
    checked(replace(REPORT, results=(NOT_RUN,)))
    code, _, err = run(capsys, "check", "v32_h16", "--device", "emulator")
    assert code == 5
    assert "none of 1 cases ran on emulator as sm_90a: needs a CUDA device" in err


@pytest.mark.parametrize("device", ["emulater", "foo", "1.5", "-1", ""])
def test_an_unknown_device_is_refused_before_anything_runs(capsys, device):
    code, out, err = run(capsys, "check", "v32_h16", "--device", device, "--only", "page.1")
    assert (code, out) == (2, "")
    assert f"device {device!r}" in err and ("did you mean 'emulator'?" in err) == (device == "emulater")


def test_a_device_goes_by_its_number(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run(capsys, "check", "v32_h16", "--device", "0", "--only", "page.1")
    assert code == 5 and "no CUDA device" in err


def test_a_failed_check_prints_how_to_replay_it(capsys, checked):
    checked(replace(REPORT, results=(WRONG,)))
    code, _, err = run(capsys, "check", "v32_h16", "--device", "emulator")
    assert code == 4
    assert "Replay: dsagen check v32_h16 --tier quick --seed 11 --device emulator --arch sm_90a" in err
