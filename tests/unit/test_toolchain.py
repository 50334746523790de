"""Finding nvcc: the order, what an explicit bad value does, versions, mixed parts, and the host compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_toolchain import bare_path, write_script, write_toolchain

from dsagen import knobs
from dsagen.build import toolchain
from dsagen.build.toolchain import find_toolchain, nvcc_candidates
from dsagen.errors import KnobError, ToolchainError

REPOSITORY = Path(knobs.__file__).parent.parent


@pytest.fixture(autouse=True)
def no_toolchain(monkeypatch, tmp_path):
    """No place that is searched holds an nvcc, whatever the machine has."""
    for name in ("DSAGEN_NVCC", "DSAGEN_EXTRA_NVCC_FLAGS", "CUDA_HOME", "CUDA_PATH", *knobs.CODE_CHANGING_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", bare_path(tmp_path))
    monkeypatch.setattr(toolchain, "DEFAULT_TOOLKIT", tmp_path / "default")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    toolchain.clear_version_cache()


def test_the_order_of_the_search(monkeypatch, tmp_path):
    pypi_old = write_toolchain(tmp_path / "site" / "nvidia" / "cu12")
    pypi = write_toolchain(tmp_path / "site" / "nvidia" / "cu13")
    assert (find_toolchain().nvcc, find_toolchain().origin) == (pypi, "PyPI")
    default = write_toolchain(tmp_path / "default")
    assert (find_toolchain().nvcc, find_toolchain().origin) == (default, str(tmp_path / "default"))
    on_path = write_toolchain(tmp_path / "on_path")
    monkeypatch.setenv("PATH", bare_path(tmp_path, on_path.parent))
    assert (find_toolchain().nvcc, find_toolchain().origin) == (on_path, "PATH")
    expected = [(on_path, False), (default, False), (pypi, False), (pypi_old, False)]
    for variable, folder in (("CUDA_PATH", "cuda_path"), ("CUDA_HOME", "cuda_home")):
        nvcc = write_toolchain(tmp_path / folder)
        monkeypatch.setenv(variable, str(tmp_path / folder))
        expected.insert(0, (nvcc, True))
        assert (find_toolchain().nvcc, find_toolchain().origin) == (nvcc, variable)
    assert [(c.path, c.explicit) for c in nvcc_candidates()] == expected
    named = write_toolchain(tmp_path / "named")
    monkeypatch.setenv("DSAGEN_NVCC", str(named))
    assert (find_toolchain().nvcc, find_toolchain().origin) == (named, "DSAGEN_NVCC")
    assert [c.path for c in nvcc_candidates()] == [named]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "no such file"),
        ("exit 3\n", "failed with exit code 3"),
        ("echo broken >&2; exit 1\n", r"exit code 1 \(broken\)"),
        ("echo gcc 12.2\n", "prints no version"),
        ("printf '\\377\\200'\n", "prints no version"),
        ("printf 'V%06000d.0.88' 9\n", "prints no version"),
        ("printf '\\377bad' >&2; exit 3\n", r"exit code 3 \(\ufffdbad\)"),
        ("cat; echo waited\n", "prints no version"),
    ],
)
def test_a_bad_explicit_nvcc_is_an_error_even_if_others_would_do(monkeypatch, tmp_path, body, reason):
    write_toolchain(tmp_path / "default")
    bad = tmp_path / "bad" / "nvcc"
    if body is not None:
        write_script(bad, body)
    monkeypatch.setenv("DSAGEN_NVCC", str(bad))
    with pytest.raises(ToolchainError, match=reason) as caught:
        find_toolchain()
    assert str(caught.value).startswith(f"DSAGEN_NVCC={str(bad)!r}: ")
    assert caught.value.exit_code == 3


def test_places_that_may_not_be_looked_into(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", "/" + "x" * 5000)
    with pytest.raises(ToolchainError, match="is not an existing folder"):
        find_toolchain()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"/{'x' * 5000}:{tmp_path / 'good' / 'bin'}:{os.environ['PATH']}")
    nvcc = write_toolchain(tmp_path / "good")
    assert find_toolchain().nvcc == nvcc


def test_a_file_that_cannot_be_executed(monkeypatch, tmp_path):
    (tmp_path / "nvcc").write_text("no program")
    monkeypatch.setenv("DSAGEN_NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(ToolchainError, match="cannot be run"):
        find_toolchain()
    monkeypatch.setenv("DSAGEN_NVCC", "nvcc")
    with pytest.raises(KnobError, match="DSAGEN_NVCC='nvcc'"):
        find_toolchain()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_bad_toolkit_variable_is_named(monkeypatch, tmp_path, variable):
    write_toolchain(tmp_path / "default")
    for value in (f":{tmp_path}/default", "cuda", str(tmp_path / "missing")):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ToolchainError) as caught:
            find_toolchain()
        assert str(caught.value).startswith(f"{variable}={value!r} is not an existing folder")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(variable, str(tmp_path / "empty"))
    with pytest.raises(ToolchainError, match=rf"^{variable}=.*empty/bin/nvcc: no such file"):
        find_toolchain()


def test_an_old_implicit_nvcc_is_skipped_with_a_line(monkeypatch, tmp_path):
    old = write_toolchain(tmp_path / "old", version="12.4.131")
    good = write_toolchain(tmp_path / "default", version="12.8.93")
    monkeypatch.setenv("PATH", bare_path(tmp_path, old.parent))
    found = find_toolchain()
    assert (found.nvcc, found.version, found.release) == (good, "12.8.93", (12, 8))
    assert found.skipped == (f"{old} (PATH): CUDA 12.4.131 is too old: dsagen needs 12.8 or newer",)
    with pytest.raises(ToolchainError) as caught:
        find_toolchain({"sm_90a": (12, 0), "sm_103a": (12, 9)})
    message = str(caught.value)
    assert "12.8.93 is too old for sm_103a, which needs 12.9" in message
    assert f"skipped {old} (PATH)" in message
    assert "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'" in message


def test_an_old_explicit_nvcc_is_an_error(monkeypatch, tmp_path):
    write_toolchain(tmp_path / "default")
    old = write_toolchain(tmp_path / "old", version="12.4.131")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    with pytest.raises(ToolchainError, match=r"^CUDA_HOME=.*12\.4\.131 is too old"):
        find_toolchain()
    monkeypatch.setenv("DSAGEN_NVCC", str(old))
    with pytest.raises(ToolchainError, match=r"^DSAGEN_NVCC=.*is too old for sm_90a, which needs 12\.8"):
        find_toolchain({"sm_90a": (12, 8)})


def test_nothing_found_says_where_it_searched_and_how_to_get_one():
    with pytest.raises(ToolchainError) as caught:
        find_toolchain()
    for place in ("DSAGEN_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "/usr/local/cuda", "site-packages", "pip install"):
        assert place in str(caught.value)
    assert "g++" not in str(caught.value)


def test_mixed_releases_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(tmp_path / "mixed", ptxas_version="13.5.37")))
    with pytest.raises(ToolchainError, match=r"nvcc is 13\.0\.88 but its ptxas .* is 13\.5\.37.*cuda-toolkit"):
        find_toolchain()


def test_ptxas_of_links_and_wrappers(monkeypatch, tmp_path):
    nvcc = write_toolchain(tmp_path / "real")
    link = tmp_path / "link" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(nvcc)
    wrapper = write_script(tmp_path / "wrapper" / "nvcc", f'exec {nvcc} "$@"\n')
    for path in (link, wrapper):
        monkeypatch.setenv("DSAGEN_NVCC", str(path))
        found = find_toolchain()
        assert (found.nvcc, found.ptxas) == (path, nvcc.with_name("ptxas"))
    nvcc.with_name("ptxas").unlink()
    with pytest.raises(ToolchainError, match="there is no ptxas beside it"):
        find_toolchain()


def test_versions_are_asked_once_per_file(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(tmp_path / "kit")))
    assert [find_toolchain().version for _ in range(3)] == ["13.0.88"] * 3
    assert (tmp_path / "kit" / "asked").read_text() == "x\n"
    write_toolchain(tmp_path / "kit", version="13.5.37")
    os.utime(tmp_path / "kit" / "bin" / "nvcc", ns=(1, 1))
    os.utime(tmp_path / "kit" / "bin" / "ptxas", ns=(1, 1))
    assert find_toolchain().version == "13.5.37"


def test_a_missing_host_compiler_is_told_apart_from_a_missing_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(tmp_path / "kit")))
    found = find_toolchain()
    found.require_host_compiler()
    (tmp_path / "tools" / "g++").unlink()
    with pytest.raises(ToolchainError, match=r"was found .* no g\+\+ on PATH\. Install g\+\+"):
        found.require_host_compiler()
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-ccbin /opt/gcc/bin/g++")
    found.require_host_compiler()


def test_importing_the_build_pulls_in_nothing_heavy():
    code = "import sys, dsagen.build; print(*sorted({'torch', 'rich', 'jinja2', 'cuda', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.compile
def test_a_real_toolchain(monkeypatch):
    nvcc = shutil.which("nvcc", path="/usr/local/cuda/bin:/usr/local/bin:/usr/bin")
    if nvcc is None:
        pytest.skip("needs nvcc in /usr/local or /usr")
    monkeypatch.setenv("DSAGEN_NVCC", nvcc)
    found = find_toolchain()
    assert found.release >= toolchain.MINIMUM_CUDA
    assert found.ptxas.is_file()
