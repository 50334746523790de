"""Flags that users add: those that would make another kernel are refused by name, in each variable and spelling."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, install_kit, write_script, write_toolchain

from dsagen import knobs
from dsagen.build import Store, build_units, find_toolchain
from dsagen.build.flags import FLAG_VARIABLES, require_faithful_flags, split_extra
from dsagen.build.key import source_key
from dsagen.cli import main
from dsagen.errors import KnobError, ToolchainError

MACHINE_PATH = knobs.foreign("PATH") or ""

ROUNDING = [
    "-use_fast_math", "--use_fast_math", "-ftz=true", "--ftz=true", "-ftz true", "--ftz false", "-prec-div=false",
    "--prec-div=false", "-prec-sqrt=false", "--prec-sqrt false", "-fmad=false", "--fmad=true",
    "-Xcompiler -ffast-math", "-Xcompiler=-O2,-ffast-math", "--compiler-options -Ofast",
    "-Xcompiler -funsafe-math-optimizations", "-Xcompiler -ffinite-math-only",
]  # fmt: skip
IN_PTXAS = ["-Xptxas -fmad=false", "--ptxas-options=--fmad=false", "-Xptxas=-v,--optimize-float-atomics"]
OTHERS = [
    ("-optf flags.txt", "a file that a kernel's key does not see"),
    ("--options-file=flags.txt", "a file that a kernel's key does not see"),
    ("-include more.h", "a file that a kernel's key does not see"),
    ("-I/usr/include", "a file that a kernel's key does not see"),
    ("-isystem /usr/include", "a file that a kernel's key does not see"),
    ("-ldir /opt/libdevice", "a file that a kernel's key does not see"),
    ("-arch=sm_80", "asks for another output"),
    ("-gencode=arch=compute_80,code=sm_80", "asks for another output"),
    ("-o elsewhere.ptx", "asks for another output"),
    ("-fatbin", "asks for another output"),
    ("--dryrun", "asks for another output"),
    ("-Xptxas -w", "hides the messages"),
    ("-Xptxas -arch=sm_80", "asks for another output"),
    ("-Xcicc -ftz=1", "hands flags past nvcc's own options"),
]


@pytest.fixture(autouse=True)
def kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return install_kit(monkeypatch, tmp_path)


@pytest.mark.parametrize("variable", ["DSAGEN_EXTRA_NVCC_FLAGS", *FLAG_VARIABLES])
@pytest.mark.parametrize(("flags", "reason"), [*((flags, "floating point rounds") for flags in ROUNDING), *OTHERS])
def test_a_flag_that_makes_another_kernel_is_refused_by_name(monkeypatch, variable, flags, reason):
    if "ptxas" in flags and variable != "DSAGEN_EXTRA_NVCC_FLAGS":
        return  # there nvcc drops what is for ptxas
    monkeypatch.setenv(variable, f"-DOK=1 {flags}")
    with pytest.raises(KnobError) as caught:
        build_units([FakeUnit()], Store.open())
    assert str(caught.value).startswith(f"{variable}: '-") and reason in str(caught.value)
    assert flags.split()[-1].split(",")[-1] in str(caught.value) or flags.split()[0] in str(caught.value)
    with pytest.raises(KnobError):
        source_key(FakeUnit())


@pytest.mark.parametrize("flags", IN_PTXAS)
def test_rounding_of_the_second_step_is_refused_too(monkeypatch, flags):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", flags)
    with pytest.raises(KnobError, match="floating point rounds"):
        require_faithful_flags()


@pytest.mark.parametrize("text", ["-use_fast_math", "'-ftz=true'", 'unpaired " -ftz=true'])
def test_words_of_nvccs_own_variables_are_found_however_they_are_quoted(monkeypatch, text):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", text)
    with pytest.raises(KnobError, match="NVCC_APPEND_FLAGS"):
        require_faithful_flags()


@pytest.mark.parametrize(
    "flags",
    ["-DX=1", "-Xptxas -O2,-v", "-G", "-lineinfo", "-ccbin /usr/bin/g++", "--maxrregcount=128", "-keep", "-std=c++20",
     "-diag-suppress=177", "-Xcompiler -O2", "--threads 2", "-res-usage", "-Werror all-warnings", "-DI=include"],
)  # fmt: skip
def test_harmless_flags_are_taken(monkeypatch, flags):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", flags)
    before = source_key(FakeUnit())
    monkeypatch.delenv("DSAGEN_EXTRA_NVCC_FLAGS")
    assert source_key(FakeUnit()) != before


def test_wrapped_flags_go_where_they_belong():
    given = ["-DA", "-Xcompiler", "-O2,-g", "-Xptxas", "-O2", "--compiler-options=-Wall"]
    assert split_extra(given) == (("-DA", "-Xcompiler", "-O2,-g", "--compiler-options=-Wall"), ("-O2",))


def test_the_command_line_and_the_doctor_name_the_flag(monkeypatch, capsys):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-use_fast_math")
    assert main(["build", "v32_h16"]) == 2
    assert "error: DSAGEN_EXTRA_NVCC_FLAGS: '-use_fast_math' is refused: it changes" in capsys.readouterr().err
    assert main(["doctor"]) == 0
    assert "DSAGEN_EXTRA_NVCC_FLAGS: '-use_fast_math' is refused" in capsys.readouterr().out


def test_what_a_shell_exports_does_not_reach_the_compilers(monkeypatch, kit):
    """nvcc.profile appends to variables with names as general as INCLUDES, and gcc obeys others."""
    seen = kit / "environment"
    nvcc = kit / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("echo x >>", f"env > {seen}\necho x >>", 2))
    monkeypatch.setenv("PATH", f"{knobs.foreign('PATH')}:/usr/bin:/bin")
    for name in knobs.KEPT_FROM_COMPILERS:
        monkeypatch.setenv(name, "-ftz=1")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    before = source_key(FakeUnit())
    build_units([FakeUnit()], Store.open())
    lines = seen.read_text().splitlines()
    assert not [line for line in lines if line.partition("=")[0] in knobs.KEPT_FROM_COMPILERS]
    assert "LC_ALL=C" in lines
    for name in knobs.KEPT_FROM_COMPILERS:
        monkeypatch.delenv(name)
    assert source_key(FakeUnit()) == before


@pytest.mark.compile
@pytest.mark.parametrize("name", ["INCLUDES", "CUDAFE_FLAGS", "SYSTEM_INCLUDES"])
def test_a_real_nvcc_lets_these_variables_in(monkeypatch, tmp_path, name):
    """Why they are kept from it: a flag in them changes the PTX."""
    monkeypatch.delenv("DSAGEN_NVCC")
    monkeypatch.setenv("PATH", MACHINE_PATH)
    (tmp_path / "a.cu").write_text('extern "C" __global__ void k(float* a) {\n#ifdef X\n  a[0] = a[1];\n#endif\n}\n')
    flag = "--pre_include x.h" if name == "CUDAFE_FLAGS" else "-DX"
    nvcc = [str(find_toolchain().nvcc), "--dryrun", "-ptx", "a.cu"]
    done = subprocess.run(
        nvcc, cwd=tmp_path, env=knobs.child_environment(**{name: flag}), capture_output=True, text=True, check=True
    )
    assert any(flag in line and not line.startswith(f"#$ {name}=") for line in done.stderr.splitlines())
    clean = knobs.compiler_environment()
    assert name not in clean


# ---- the compiler launcher


def test_a_launcher_runs_nvcc_and_is_no_part_of_the_key(monkeypatch, tmp_path, kit):
    before = source_key(FakeUnit())
    launcher = write_script(tmp_path / "a launcher", f'echo "$@" >> {tmp_path}/launched\nexec "$@"\n')
    monkeypatch.setenv("DSAGEN_COMPILER_LAUNCHER", f"'{launcher}' --some-option")
    launcher.write_text(launcher.read_text().replace('exec "$@"', 'shift\nexec "$@"'))
    assert source_key(FakeUnit()) == before
    entry = build_units([FakeUnit()], Store.open())[0].entry
    (line,) = (tmp_path / "launched").read_text().splitlines()
    assert line.startswith(f"--some-option {kit}/bin/nvcc -std=c++17 -ptx ")
    assert "--some-option" in entry.report["command"]
    monkeypatch.delenv("DSAGEN_COMPILER_LAUNCHER")
    assert build_units([FakeUnit()], Store.open())[0].was_cached


@pytest.mark.parametrize("launcher", ["no-such-launcher", "/no/such/launcher"])
def test_a_launcher_that_is_not_there_is_named_before_anything_compiles(monkeypatch, launcher):
    monkeypatch.setenv("DSAGEN_COMPILER_LAUNCHER", launcher)
    with pytest.raises(KnobError, match=rf"DSAGEN_COMPILER_LAUNCHER='{launcher}': no program of that name"):
        build_units([FakeUnit()], Store.open())


def test_the_arch_of_a_unit_decides_how_new_nvcc_must_be(monkeypatch, kit, tmp_path):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(tmp_path / "old", version="12.8.93")))
    build_units([FakeUnit()], Store.open())
    with pytest.raises(ToolchainError, match=r"CUDA 12\.8\.93 is too old for sm_103a, which needs 12\.9"):
        build_units([FakeUnit(slug="fake.sm103a.x", arch="sm_103a")], Store.open())
