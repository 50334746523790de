"""Environment knobs: parsing, defaults, error texts, unknown names, and that nothing else reads the environment."""

import ast
import os
from pathlib import Path

import pytest

from dsagen import knobs
from dsagen.errors import KnobError

PACKAGE = Path(knobs.__file__).parent


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("DSAGEN_") or name == "MAX_JOBS":
            monkeypatch.delenv(name)


def test_unset_and_empty_give_the_default(monkeypatch):
    for knob in knobs.all_knobs():
        assert knob.get() == knob.default
        monkeypatch.setenv(knob.name, " ")
        assert knob.get() == knob.default
        assert not knob.is_set()


def test_every_knob_is_named_and_documented():
    names = [knob.name for knob in knobs.all_knobs()]
    assert len(set(names)) == len(names)
    constants = {name: value for name, value in vars(knobs).items() if isinstance(value, knobs.Knob)}
    assert {f"DSAGEN_{constant}": knob.name for constant, knob in constants.items()} == {name: name for name in names}
    assert all(knob.doc.endswith(".") for knob in knobs.all_knobs())


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (knobs.CACHE_DIR, "/a:/b/c", (Path("/a"), Path("/b/c"))),
        (knobs.ARCH_LIST, "9.0a 10.0f,sm_120A; 86 sm_90a", ("sm_90a", "sm_100f", "sm_120a", "sm_86")),
        (knobs.NO_JIT, "TRUE", True),
        (knobs.NO_JIT, "0", False),
        (knobs.MAX_JOBS, "7", 7),
        (knobs.JOB_MEM_GB, "0.25", 0.25),
        (knobs.NVCC, "/opt/cuda/bin/nvcc", Path("/opt/cuda/bin/nvcc")),
        (knobs.EXTRA_NVCC_FLAGS, "-DA='x y' -G", ("-DA=x y", "-G")),
        (knobs.LOG, "Debug", "debug"),
        (knobs.LOG_DEST, "stdout", "stdout"),
        (knobs.LOG_DEST, "/tmp/log", "/tmp/log"),
        (knobs.DEBUG_SYNC, "on", True),
        (knobs.CHECK_INDICES, "no", False),
        (knobs.PEER_SITE, "/", "/"),
    ],
)
def test_parses(monkeypatch, knob, text, value):
    monkeypatch.setenv(knob.name, text)
    assert knob.get() == value
    assert type(knob.get()) is type(value)


@pytest.mark.parametrize(
    ("knob", "text", "allowed"),
    [
        (knobs.CACHE_DIR, ":/usr/local/cache", "leading"),
        (knobs.CACHE_DIR, "/a::/b", "double colon"),
        (knobs.CACHE_DIR, "cache", "absolute"),
        (knobs.ARCH_LIST, "sm_90a,hopper", "'hopper' is no arch"),
        (knobs.NO_JIT, "maybe", "expected one of"),
        (knobs.MAX_JOBS, "0", "1 or more"),
        (knobs.MAX_JOBS, "2.5", "whole number"),
        (knobs.JOB_MEM_GB, "-1", "above 0"),
        (knobs.JOB_MEM_GB, "nan", "above 0"),
        (knobs.EXTRA_NVCC_FLAGS, "-D'x", "quoting"),
        (knobs.LOG, "inof", "did you mean 'info'"),
        (knobs.LOG_DEST, "log.txt", "absolute"),
        (knobs.NVCC, "nvcc", "absolute"),
        (knobs.NVCC, "~nobody-of-this-name/nvcc", "cannot expand"),
        (knobs.PEER_SITE, "/no/such/folder", "no such folder"),
        (knobs.PEER_SITE, "/" + "x" * 5000, "cannot be read (File name too long)"),
        (knobs.MAX_JOBS, "\u0661", "whole number"),
        (knobs.MAX_JOBS, "9" * 5000, "whole number"),
        (knobs.JOB_MEM_GB, f"0.{'0' * 310}1", "0.001 to 1e+06 GiB"),
        (knobs.JOB_MEM_GB, "9" * 400, "0.001 to 1e+06 GiB"),
        (knobs.EXTRA_NVCC_FLAGS, "-D\udcff", "character 2 is no UTF-8"),
        (knobs.CACHE_DIR, "/store\udcff", "character 6 is no UTF-8"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(monkeypatch, knob, text, allowed):
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(KnobError) as caught:
        knob.get()
    message = str(caught.value)
    assert message.startswith(f"{knob.name}={text!r}: ")
    assert allowed in message
    assert caught.value.exit_code == 2


def test_what_nvcc_reads_by_itself_must_be_text(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-D\udcff")
    with pytest.raises(KnobError, match=r"^NVCC_APPEND_FLAGS='-D\\udcff': character 2 is no UTF-8"):
        knobs.code_changing_environment()


def test_max_jobs_of_other_tools_is_the_fallback(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert knobs.MAX_JOBS.get() == 3
    monkeypatch.setenv("DSAGEN_MAX_JOBS", "5")
    assert knobs.MAX_JOBS.get() == 5
    assert knobs.MAX_JOBS.raw() == ("DSAGEN_MAX_JOBS", "5")
    monkeypatch.delenv("DSAGEN_MAX_JOBS")
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(KnobError, match=r"^MAX_JOBS='many'"):
        knobs.MAX_JOBS.get()


def test_unknown_variables_get_a_suggestion(monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHEDIR", "/x")
    monkeypatch.setenv("DSAGEN_QUX", "1")
    monkeypatch.setenv("DSAGEN_LOG", "info")
    near, far = knobs.unknown_knobs()
    assert (near.name, near.value, near.suggestion) == ("DSAGEN_CACHEDIR", "/x", "DSAGEN_CACHE_DIR")
    assert "did you mean DSAGEN_CACHE_DIR" in near.message()
    assert (far.name, far.suggestion) == ("DSAGEN_QUX", None)


def test_default_store_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert knobs.default_cache_dir() == Path("/home/someone/.cache/dsagen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert knobs.default_cache_dir() == Path("/var/cache/dsagen")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert knobs.default_cache_dir() == Path("/home/someone/.cache/dsagen")


def test_foreign_variables_are_declared(monkeypatch):
    for name in knobs.CODE_CHANGING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert knobs.code_changing_environment() == {}
    monkeypatch.setenv("CPATH", "/inc")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "")
    assert knobs.code_changing_environment() == {"CPATH": "/inc"}
    with pytest.raises(KeyError, match="not declared"):
        knobs.foreign("LANG")


def _environment_uses(path: Path) -> list[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    uses = []
    for node in ast.walk(ast.parse(path.read_text())):
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if attribute or imported:
            uses.append(f"{path}:{node.lineno}")
    return uses


def test_only_knobs_reads_the_environment():
    assert _environment_uses(PACKAGE / "knobs.py"), "the walk must see what it looks for"
    others = [path for path in PACKAGE.rglob("*.py") if path.name != "knobs.py"]
    assert [use for path in others for use in _environment_uses(path)] == []
