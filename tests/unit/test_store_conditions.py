"""A store that has moved, aged or lies somewhere odd stays warm; what a kernel is made of decides, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, compiles, install_kit

from dsagen import knobs
from dsagen.build import Store, build_units, find_toolchain
from dsagen.build.key import source_key
from dsagen.errors import KnobError, StoreError
from dsagen.matrix import expand
from dsagen.render import read_header, render, templates_folder
from dsagen.runtime.loader import code_of_entries, read_cubins
from dsagen.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]
UNIT = FakeUnit()


@pytest.fixture(autouse=True)
def kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return install_kit(monkeypatch, tmp_path)


def build(unit: FakeUnit = UNIT):
    return build_units([unit], Store.open())[0]


def test_a_renamed_prefix_stays_warm(monkeypatch, tmp_path, kit):
    name = build().entry.name
    (tmp_path / "store").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    for place in ("moved", "copied"):
        monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / place))
        result = build()
        assert result.was_cached and result.entry.path == tmp_path / place / "v1" / name
    assert compiles(kit) == 1


@pytest.mark.parametrize("stamp", [0, 1, 4_000_000_000])
def test_touched_files_stay_warm(tmp_path, kit, stamp):
    build()
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (stamp, stamp))
    assert build().was_cached
    assert compiles(kit) == 1


def test_a_checkout_elsewhere_with_other_times_has_the_same_keys(tmp_path):
    """Reinstalled sources, older or newer than what was compiled of them, give what they gave."""
    for folder in ("dsagen", "templates", "specs"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (tmp_path / "copy").rglob("*"):
        os.utime(path, (1, 1))
    code = (
        "from dsagen.build.key import source_key; from dsagen.matrix import expand; from dsagen.render import render\n"
        "from dsagen.spec import load_spec; import dsagen; print(dsagen.__file__)\n"
        "print(*[source_key(render(plan)) for plan in expand(load_spec('v32_h16')).plans()])"
    )
    outputs = []
    for root in (ROOT, tmp_path / "copy"):
        environment = knobs.child_environment(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        place, keys = done.stdout.splitlines()
        assert place.startswith(str(root))
        outputs.append(keys)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "header", sorted(path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.cuh"))
)
def test_an_edited_header_changes_the_key_of_what_it_is_in(header):
    """Whichever header it is: in the units that contain it the key changes, in the others it does not."""
    plans = [
        plan for name in ("v32_h16", "v32_topk_h128", "v41_kv_cache_h64") for plan in expand(load_spec(name)).plans()
    ]

    def edited(name: str) -> str:
        return read_header(name) + ("// edited\n" if name == header else "")

    assert (templates_folder() / header).is_file()
    for plan in plans:
        before, after = render(plan), render(plan, edited)
        contains = f"// ---- {header}\n" in before.text
        assert (source_key(before) != source_key(after)) is contains


# ---- homes


def clear_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSAGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("home", "words"), [("", "HOME='': names no home folder"), ("here", "is no absolute path")])
def test_a_home_that_is_none_is_an_error_naming_the_variable(monkeypatch, home, words):
    clear_places(monkeypatch)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(KnobError, match="set DSAGEN_CACHE_DIR to a folder") as caught:
        Store.open()
    assert words in str(caught.value)


def test_without_a_home_a_set_store_is_all_that_is_needed(monkeypatch, tmp_path):
    clear_places(monkeypatch)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    assert not build().was_cached


def test_an_unwritable_home_still_hits_and_a_miss_names_the_variable(monkeypatch, tmp_path):
    clear_places(monkeypatch)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    entry = build().entry
    assert entry.path.parent == home / ".cache" / "dsagen" / "v1"
    # What cannot be written whoever asks, root included: a file where the folders for builds should be.
    for name in (".locks", ".work"):
        shutil.rmtree(entry.path.parent / name)
        (entry.path.parent / name).write_text("")
    assert build().entry == entry
    with pytest.raises(StoreError, match=rf"{home}.* Set DSAGEN_CACHE_DIR"):
        build(FakeUnit(slug="fake.sm90a.other"))


def test_a_root_that_is_a_file_has_no_entries_and_no_broken_ones(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "file"))
    assert Store.open().lookup(UNIT, find_toolchain()) is None
    assert Store.open().entries() == []
    assert caplog.text == ""
    with pytest.raises(StoreError, match=r"can be written: .*file \(Not a directory\)"):
        build()


# ---- an entry that is replaced between its look-up and its reading


def test_what_is_loaded_is_what_was_verified(monkeypatch):
    plans = expand(load_spec("v32_h16")).plans()[1:]
    log = Path(os.environ["DSAGEN_NVCC"]).parent / "ptxas"
    log.write_text(log.read_text().replace("dsa_fake", plans[0].symbol).replace("168 registers", "32 registers"))
    (cubin,) = read_cubins(plans).values()
    taken = []

    def take(entry):
        taken.append(entry)
        if len(taken) == 1:
            shutil.rmtree(entry.path)  # as another process's forced build does, before its own appears
        return entry.read("kernel.cubin")

    assert code_of_entries(plans, take) == {plans[0].slug: cubin}
    assert len(taken) == 2

    def tamper(entry):
        entry.cubin_path.write_bytes(b"\x7fELF other")
        return entry.read("kernel.cubin")

    with pytest.raises(StoreError, match=r"change while they are read \(kernel\.cubin \(10 bytes\) does not match"):
        code_of_entries(plans, tamper)
