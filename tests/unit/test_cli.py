"""The command line without a device: output, exit codes, error lines, and what it leaves alone."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dsagen import knobs
from dsagen.arch import ARCHS
from dsagen.cli import main
from dsagen.spec import shipped_specs

ROOT = Path(__file__).resolve().parents[2]
SMALL_SPEC = "model: v32\nheads: 24\narchs: [sm_90a, sm_89]\nops: [sparse_decode]\n"


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL_SPEC)
    return str(path)


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in which nothing is compiled, whatever other tests have built."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "empty-store"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def run_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


# ---- list, explain, schema, render


def test_list_shows_every_shipped_spec_and_refuses_none(capsys):
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    assert all(f"{name}: " in out for name in shipped_specs())
    assert "refused" not in out


def test_list_shows_why_a_spec_is_refused(capsys, no_fp4):
    code, out, err = run(capsys, "list", "v41_h128")
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["sparse_decode", "main"] and "refused" in line]
    assert no_fp4 in line


@pytest.mark.usefixtures("empty_store", "no_evidence")
def test_list_as_json(capsys, spec_file):
    (spec,) = run_json(capsys, "list", spec_file)["specs"]
    assert (spec["spec"], spec["complete"]) == ("mine", True)
    assert [(cell["arch"], cell["role"]) for cell in spec["cells"]] == [
        ("sm_90a", "main"),
        ("sm_90a", "combine"),
        ("sm_89", "main"),
        ("sm_89", "combine"),
    ]
    assert all(cell["kept"] and cell["reason"] is None and cell["rung"] == "planned" for cell in spec["cells"])


def test_list_as_json_gives_the_reason_of_a_refusal(capsys, no_fp4):
    (spec,) = run_json(capsys, "list", "v41_h128")["specs"]
    assert spec["complete"] is False
    assert all(not cell["kept"] and cell["slug"] is None and no_fp4 in cell["reason"] for cell in spec["cells"])


def test_arch_option_restricts_and_takes_lists(capsys, spec_file):
    def archs(*options: str) -> set[str]:
        (spec,) = run_json(capsys, "list", spec_file, *options)["specs"]
        return {cell["arch"] for cell in spec["cells"]}

    assert archs("--arch", "89") == {"sm_89"}
    assert archs("--arch", "sm_89,9.0a") == archs("--arch", "sm_89", "--arch", "sm_90a") == {"sm_89", "sm_90a"}


def test_arch_list_knob_restricts_unless_the_option_is_given(capsys, spec_file, monkeypatch):
    monkeypatch.setenv("DSAGEN_ARCH_LIST", "8.9")
    assert "sm_90a" not in run(capsys, "list", spec_file)[1]
    assert "sm_90a" in run(capsys, "list", spec_file, "--arch", "sm_90a")[1]


@pytest.mark.usefixtures("empty_store")
def test_explain_shows_every_field_guard_and_argument(capsys):
    from dsagen.families.sparse_decode import FAMILY
    from dsagen.limits import BUILD_GUARDS, CALL_RULES, LOAD_GUARDS
    from dsagen.matrix import expand
    from dsagen.spec import load_spec

    code, out, _ = run(capsys, "explain", "v32_h16")
    assert code == 0
    plan = expand(load_spec("v32_h16")).plans()[0]
    for field in plan.smem:
        assert f"{field.offset_bytes} .. " in out
        assert field.note in out
    assert all(f" {field.declaration} " in out for field in plan.params)
    guards = (*FAMILY.guards, *BUILD_GUARDS, *LOAD_GUARDS)
    assert all(f"[{guard.guard_id}]" in out and guard.expression in out for guard in guards)
    assert all(f"[{rule}]" in out and text in out for rule, text in CALL_RULES.items())
    assert "not compiled yet" in out


def test_explain_as_json_is_the_plan(capsys):
    explained = run_json(capsys, "explain", "v32_h16")
    main_kernel, combine = explained["variants"]
    last = main_kernel["plan"]["smem"][-1]
    assert (last["name"], last["extents"]) == ("followed", [2, 16])
    end_bytes = last["offset_bytes"] + 4 * 2 * 16
    assert end_bytes <= main_kernel["plan"]["smem_bytes"] < end_bytes + 1024
    assert main_kernel["launch_guards"]
    assert combine["launch_guards"] == []
    assert explained["spec"]["heads"] == 16


def test_explain_of_a_call_shows_choice_and_splits(capsys):
    code, out, _ = run(capsys, "explain", "v32_h16", "--batch", "4")
    assert code == 0
    assert out.startswith("v32_h16 on sm_90a (NVIDIA H200, 132 multiprocessors)")
    assert "[SD-06] 1 <= topk and topk <= topk_capacity  topk=2048  topk_capacity=2048  holds" in out
    assert "chosen: sparse_decode-main-" in out and "workspace: " in out


def test_explain_of_a_call_speaks_of_each_op_that_the_spec_has(capsys, tmp_path):
    spec = tmp_path / "both.yaml"
    spec.write_text("model: v32\nheads: 16\narchs: [sm_90a, sm_80]\nops: [topk, sparse_decode]\n")
    code, out, _ = run(capsys, "explain", str(spec), "--batch", "4", "--sms", "132", "--width", "4096")
    assert code == 0
    assert out.count("chosen: sparse_decode-main-") == out.count("chosen: topk-main-row_resident-") == 2
    spec.write_text("model: v32\nheads: 16\narchs: [sm_80]\nops: [topk]\n")
    sizes = ("--batch", "2", "--s-q", "2", "--topk", "512", "--width", "131072", "--sms", "108")
    code, out, _ = run(capsys, "explain", str(spec), *sizes)
    assert code == 0 and "sparse_decode" not in out
    assert out.startswith("both on sm_80 (108 multiprocessors)\nshape: 4 rows of 131072 scores, k 512\n")
    assert "chosen: topk-count-row_split-sm_80-score.fp32 + topk-select-row_split-sm_80-score.fp32\n" in out
    assert "grid: 64 CTAs, 16 a row\n" in out
    code, out, _ = run(capsys, "explain", str(spec), "--batch", "4", "--width", "4096")
    assert code == 0 and "sm_80: no device of this arch was measured: give its multiprocessors with --sms" in out


@pytest.mark.parametrize("body", ["hopper", "mma_sync"])
def test_explain_of_a_call_names_no_kernel_that_only_steps_take(capsys, tmp_path, monkeypatch, body):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
    spec = tmp_path / "step.yaml"
    index = "{heads: 64, accumulation: fast, histogram: true}"
    spec.write_text(
        f"model: v32\nheads: 16\narchs: [sm_90a]\nops: [indexer_logits, topk, sparse_decode]\nindex: {index}\n"
    )
    every = run(capsys, "explain", str(spec))[1]
    assert "launch.dependent" in every and "indexer_logits-counted-" in every
    code, out, _ = run(capsys, "explain", str(spec), "--batch", "4", "--width", "16384")
    assert code == 0 and "launch.dependent" not in out and "-counted-" not in out
    assert "chosen: topk-main-row_resident-sm_90a-score.fp32-threads.1024-smem.227\n" in out
    assert f"chosen: sparse_decode-main-{body}-" in out and "kernel: indexer_logits-main-" in out


def test_explain_of_a_call_of_topk_needs_the_width(capsys, tmp_path):
    spec = tmp_path / "topk.yaml"
    spec.write_text("model: v32\nheads: 16\narchs: [sm_90a]\nops: [topk]\n")
    code, _, err = run(capsys, "explain", str(spec), "--batch", "4")
    assert code == 2
    assert "explain --batch: which kernel takes a call of topk depends on its rows: give --width" in err
    assert run(capsys, "explain", str(spec), "--batch", "4", "--width", "0")[0] == 0


def test_explain_of_a_call_that_nothing_takes_names_the_guard(capsys):
    code, out, _ = run(capsys, "explain", "v32_h16", "--batch", "4", "--topk", "4096")
    assert code == 0
    assert "refuses: topk: 4096 columns, the spec declares topk 2048" in out and "chosen: none" in out


def test_explain_of_a_call_on_an_unmeasured_arch_asks_for_the_sm_count(capsys, spec_file):
    out = run(capsys, "explain", spec_file, "--batch", "4")[1]
    assert "sm_89: no device of this arch was measured: give its multiprocessors with --sms" in out
    assert "on sm_89 (128 multiprocessors)" in run(capsys, "explain", spec_file, "--batch", "4", "--sms", "128")[1]


def test_explain_of_a_call_has_no_json(capsys):
    code, out, err = run(capsys, "explain", "v32_h16", "--batch", "4", "--json")
    assert (code, out) == (2, "")
    assert "--batch prints text only" in err


def test_explain_of_a_refused_spec_says_why(capsys, no_fp4):
    code, out, _ = run(capsys, "explain", "v41_h128")
    assert code == 0
    assert f"refused: sparse_decode main on sm_90a: {no_fp4}" in out


def test_schema_is_json_schema(capsys):
    code, out, _ = run(capsys, "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["required"]) == {"model", "heads", "archs", "ops"}


def test_render_writes_complete_text(capsys, spec_file, tmp_path):
    files = run_json(capsys, "render", spec_file, "--arch", "sm_89", "--out", str(tmp_path / "out"))["files"]
    assert [Path(file["path"]).parent for file in files] == [tmp_path / "out" / "generated" / "sm_89"] * 2
    for file in files:
        text = Path(file["path"]).read_text()
        assert 'extern "C" __global__ void __launch_bounds__' in text and file["symbol"] in text
        assert "#include" not in text


# ---- build


@pytest.mark.compile
@pytest.mark.usefixtures("no_evidence")
def test_build_lists_compiles_and_then_finds_everything(capsys, spec_file, tmp_path):
    options = ["build", spec_file, "--arch", "sm_90a", "--out", str(tmp_path)]
    code, out, err = run(capsys, *options, "--force")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("mine: v32, 24 heads")
    assert lines[1].split()[:4] == ["sparse_decode", "main", "sm_90a", "kept"]
    assert lines[-1].startswith("2 kernels in ") and "2 compiled, 0 cached" in lines[-1]
    assert "compiling 2 kernels" in err
    assert len(list((tmp_path / "generated" / "sm_90a").glob("*.cu"))) == 2

    built = run_json(capsys, *options)
    assert [kernel["cached"] for kernel in built["kernels"]] == [True, True]
    assert all(Path(kernel["path"], "kernel.cubin").is_file() for kernel in built["kernels"])
    assert run(capsys, *options, "--quiet") == (0, "", "")

    (spec,) = run_json(capsys, "list", spec_file, "--arch", "sm_90a")["specs"]
    assert {cell["rung"] for cell in spec["cells"]} == {"compiled"}
    assert f"{built['kernels'][0]['report']['registers']} used" in run(capsys, "explain", spec_file)[1]


@pytest.mark.compile
def test_a_warm_build_takes_at_most_a_second(spec_file, tmp_path):
    command = ("-m", "dsagen", "build", spec_file, "--arch", "sm_90a", "--out", str(tmp_path))
    assert run_process(*command).returncode == 0
    durations = []
    for _ in range(3):
        # Processor time, since the wall clock of a busy machine says nothing of the build.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "0 compiled" in run_process(*command).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        durations.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(durations) <= 1.0


@pytest.mark.compile
def test_a_kernel_that_does_not_compile_is_a_failed_build(capsys, spec_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-DkStages=1")
    code, _, err = run(capsys, "build", spec_file, "--out", str(tmp_path), "--arch", "sm_90a")
    assert code == 3
    assert "Traceback" not in err
    assert "error: 1 of 2 kernels did not build:" in err
    assert "log: " in err and "repeat: cd " in err


def test_build_without_a_toolchain_is_a_failed_build(capsys, spec_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("DSAGEN_NVCC", "/nowhere/nvcc")
    code, _, err = run(capsys, "build", spec_file, "--out", str(tmp_path))
    assert code == 3
    assert err.startswith("error: ") and "DSAGEN_NVCC='/nowhere/nvcc'" in err and "Traceback" not in err


def test_build_names_the_part_that_is_not_built(capsys, tmp_path, no_fp4):
    code, out, err = run(capsys, "build", "v41_h128", "--out", str(tmp_path))
    assert code == 2
    assert "refused" in out
    assert no_fp4 in err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(capsys, spec_file, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = run(capsys, "build", spec_file, "--out", str(blocked))
    assert code == 3
    assert err.startswith("error: ") and str(blocked) in err and "--out" in err


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build"], ["Missing argument 'SPEC...'"]),
        (["biuld", "v32_h16"], ["no command 'biuld'", "did you mean 'build'?"]),
        (["list", "v32_h61"], ["spec v32_h61: no such file", "did you mean v32_h64?"]),
        (["list", "v32_h16", "--arch", "sm_90"], ["lacks its suffix", "sm_90a"]),
        (["list", "v32_h16", "--arch", "sm_80"], ["sm_80 is not among its archs (sm_90a)"]),
        (["build", "v32_h16", "--jobs", "0"], ["--jobs", "x>=1"]),
        (["explain", "v32_h16", "--frobnicate"], ["No such option", "--frobnicate"]),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "error: " in err and "Traceback" not in err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("heads: 16\n", ["model"]),
        (SMALL_SPEC + "haeds: 3\n", ["haeds", "heads"]),
        (SMALL_SPEC + "heads: 3\n", ["duplicate key 'heads'"]),
        (SMALL_SPEC.replace("24", "129"), ["heads", "129", "128"]),
        (SMALL_SPEC.replace("24", "!!python/object/apply:os.system [id]"), ["tag"]),
        (SMALL_SPEC + "name: '${ plan }'\n", ["name"]),
        (SMALL_SPEC + "name: 'x\"; asm(\"'\n", ["name"]),
        ("a: &a [x]\nb: [*a, *a]\n", ["anchors"]),
        ("- 1\n", ["top level"]),
    ],
)
def test_a_bad_spec_is_named_with_file_and_line(capsys, tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    code, out, err = run(capsys, "build", str(path), "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and str(path) in err and "Traceback" not in err
    assert all(word in err for word in words), err


def test_two_specs_of_one_name_that_differ_are_refused(capsys, tmp_path):
    paths = []
    for heads in (8, 16):
        path = tmp_path / f"h{heads}.yaml"
        path.write_text(SMALL_SPEC.replace("24", str(heads)) + "name: same\n")
        paths.append(str(path))
    code, _, err = run(capsys, "list", *paths)
    assert code == 2
    assert "two different specs are named 'same'" in err


def test_a_bad_knob_is_bad_input(capsys, monkeypatch):
    monkeypatch.setenv("DSAGEN_LOG", "loud")
    code, _, err = run(capsys, "list", "v32_h16")
    assert code == 2
    assert "DSAGEN_LOG='loud'" in err


def test_a_log_file_that_cannot_be_opened_is_bad_input(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_LOG_DEST", str(tmp_path / "missing" / "log"))
    code, _, err = run(capsys, "list", "v32_h16")
    assert code == 2
    assert "DSAGEN_LOG_DEST" in err


# ---- process behaviour


def test_interrupt_is_130(capsys, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsagen.spec.load_spec", interrupt)
    code, _, err = run(capsys, "list", "v32_h16")
    assert code == 130
    assert err.strip() == "error: interrupted"


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m dsagen explain v32_h128 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["explain", "v32_h16"], ["schema"], ["--help"], ["doctor"], ["render", "v32_h16", "--out", "{tmp}"]],
)
def test_information_commands_import_neither_torch_nor_rich(arguments, tmp_path):
    words = [word.format(tmp=tmp_path) for word in arguments]
    code = (
        "import sys; from dsagen.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = run_process("-c", code, *words)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "[]"


def test_information_commands_need_no_toolkit(tmp_path):
    for arguments in (["list"], ["explain", "v32_h16"], ["schema"], ["doctor"]):
        done = run_process("-m", "dsagen", *arguments, PATH="", DSAGEN_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr


def test_verbose_says_what_is_compiled_and_why(capsys, spec_file, tmp_path, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("DSAGEN_NVCC", "/nowhere/nvcc")
    _, _, err = run(capsys, "-vv", "build", spec_file, "--out", str(tmp_path))
    assert "dsagen DEBUG: sparse_decode-main-" in err and "to compile (not in the store)" in err


# ---- doctor


def test_doctor_names_unknown_and_bad_knobs(capsys, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIRS", "/tmp")
    monkeypatch.setenv("DSAGEN_MAX_JOBS", "many")
    report = run_json(capsys, "doctor")
    assert any("DSAGEN_CACHE_DIRS" in line and "did you mean DSAGEN_CACHE_DIR?" in line for line in report["problems"])
    assert any("DSAGEN_MAX_JOBS='many'" in line for line in report["problems"])
    assert [row["name"] for row in report["knobs"]] == [knob.name for knob in knobs.all_knobs()]


def test_doctor_says_where_nvcc_would_come_from(capsys, monkeypatch):
    monkeypatch.setenv("DSAGEN_NVCC", "/nowhere/nvcc")
    report = run_json(capsys, "doctor")
    assert "nvcc" not in report["toolchain"]
    assert any("DSAGEN_NVCC='/nowhere/nvcc'" in line for line in report["problems"])
    assert "nvcc" in run(capsys, "doctor")[1]


def test_doctor_describes_each_store_root(capsys, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{blocked}/store:{tmp_path}/new")
    report = run_json(capsys, "doctor")
    assert [row["writable"] for row in report["store"]] == [False, True]
    assert not (tmp_path / "new").exists()


def test_doctor_without_a_device_says_what_still_works(capsys, monkeypatch):
    from dsagen.runtime import survey

    found = survey.DeviceSurvey(None, (), "no CUDA driver (libcuda.so.1)")
    monkeypatch.setattr(survey, "survey_devices", lambda: found)
    assert "no CUDA driver (libcuda.so.1): kernels can be built here, not run" in run(capsys, "doctor")[1]


def test_doctor_lists_devices(capsys, monkeypatch):
    from dsagen.runtime import survey

    device = survey.SurveyedDevice(0, "NVIDIA H200", "sm_90a", 150 << 30)
    monkeypatch.setattr(survey, "survey_devices", lambda: survey.DeviceSurvey("13.0", (device,), None))
    assert "cuda:0  NVIDIA H200  sm_90a" in run(capsys, "doctor")[1]


def test_version_and_help(capsys):
    assert run(capsys, "--version")[1].startswith("dsagen ")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "Exit codes: 0 success, 2 bad input, 3 failed build" in " ".join(out.split())


def test_every_arch_can_be_listed(capsys, tmp_path):
    path = tmp_path / "everywhere.yaml"
    path.write_text(f"model: v32\nheads: 16\narchs: [{', '.join(ARCHS)}]\nops: [sparse_decode]\n")
    (spec,) = run_json(capsys, "list", str(path))["specs"]
    assert {cell["arch"] for cell in spec["cells"]} == set(ARCHS)
    assert spec["complete"]


@pytest.mark.parametrize(("listed", "text"), [("7.5", "unknown arch 'sm_75'"), ("sm_120a", "sm_120a is not among its")])
def test_an_arch_that_only_a_variable_names_is_told_with_it(capsys, monkeypatch, listed, text):
    monkeypatch.setenv("DSAGEN_ARCH_LIST", listed)
    code, _, err = run(capsys, "list", "v32_h16")
    name = f"sm_{listed.replace('.', '').removeprefix('sm_')}"
    assert code == 2 and err.startswith(f"error: DSAGEN_ARCH_LIST={name}: ") and text in err
