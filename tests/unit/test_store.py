"""The store: keys, layers, broken entries, unwritable roots, and look-ups without a toolchain."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, compiles, install_kit, write_toolchain

from dsagen import knobs
from dsagen.build import Store, build_units, find_toolchain
from dsagen.build.entry import MARKER, MEMBERS
from dsagen.build.key import compile_flags, source_key
from dsagen.errors import StoreError, ToolchainError

REPOSITORY = Path(knobs.__file__).parent.parent
UNIT = FakeUnit()


@pytest.fixture(autouse=True)
def kit(monkeypatch, tmp_path):
    return install_kit(monkeypatch, tmp_path)


def no_toolchain():
    raise ToolchainError("No usable nvcc")


def build(unit=UNIT, store=None, **options):
    return build_units([unit], store or Store.open(), **options)[0]


def use_version(monkeypatch, folder, version):
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(folder, version=version)))


def test_an_entry_is_complete_and_found_again(kit, tmp_path):
    built = build()
    entry = built.entry
    assert not built.was_cached
    assert {path.name for path in entry.path.iterdir()} == {*MEMBERS, MARKER}
    assert entry.path == tmp_path / "store" / "v1" / f"{UNIT.slug}.{entry.stamp.key[:12]}"
    assert (entry.slug, entry.symbol, entry.arch, entry.nvcc_version) == (UNIT.slug, UNIT.symbol, "sm_90a", "13.0.88")
    assert (entry.variant, entry.plan) == (UNIT.variant, UNIT.plan)
    assert entry.source_path.read_text() == UNIT.text
    assert entry.cubin_path.read_bytes().startswith(b"\x7fELF")
    assert entry.report["registers"] == 168
    assert f"nvcc {' '.join(compile_flags('sm_90a').nvcc)} kernel.cu -o kernel.ptx" in entry.report["command"]
    again = build()
    assert again.was_cached
    assert again.entry == entry == Store.open().lookup(UNIT, find_toolchain())
    assert Store.open().entries() == [entry]
    assert compiles(kit) == 1


def test_the_store_ships_no_leftovers(tmp_path):
    build()
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"slug": "fake.sm90a.y"},
        {"symbol": "dsa_other"},
        {"arch": "sm_100a"},
        {"text": UNIT.text + "\n"},
        {"variant": {"family": "fake", "heads": 24}},
        {"plan": {"tile": [64, 32]}},
    ],
)
def test_every_part_of_a_unit_is_in_the_key(change):
    assert source_key(replace(UNIT, **change)) != source_key(UNIT)


@pytest.mark.parametrize("variable", ["DSAGEN_EXTRA_NVCC_FLAGS", *knobs.CODE_CHANGING_VARIABLES])
def test_flags_and_the_environment_of_nvcc_are_in_the_key(monkeypatch, variable):
    before = source_key(UNIT)
    monkeypatch.setenv(variable, "-DX")
    assert source_key(UNIT) != before


def test_the_key_knows_no_order_path_or_time(monkeypatch, tmp_path):
    before = source_key(UNIT)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert source_key(replace(UNIT, variant=dict(reversed(UNIT.variant.items())), plan={"tile": (64, 64)})) == before


def test_extra_ptxas_flags_reach_ptxas(monkeypatch):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-DA=1 -Xptxas -O2,--def-load-cache=ca --ptxas-options=-O3 -DB")
    flags = compile_flags("sm_120a")
    assert flags.nvcc[-2:] == ("-DA=1", "-DB")
    assert flags.ptxas[-3:] == ("-O2", "--def-load-cache=ca", "-O3")
    assert "-gencode=arch=compute_120a,code=sm_120a" in flags.nvcc
    assert "-arch=sm_120a" in flags.ptxas


def test_a_hit_needs_no_toolchain(kit):
    entry = build().entry
    assert Store.open().lookup(UNIT) == entry
    assert build(toolchain_finder=no_toolchain).entry == entry
    with pytest.raises(ToolchainError, match=r"1 kernel is not in the store \(fake\.sm90a\.z\).*No usable nvcc"):
        build(replace(UNIT, slug="fake.sm90a.z"), toolchain_finder=no_toolchain)


def test_another_compiler_version_is_rebuilt_beside(monkeypatch, tmp_path):
    versions = ["13.0.88", "13.0.100", "13.0.9"]
    entries = {}
    for version in versions:
        use_version(monkeypatch, tmp_path / version, version)
        assert Store.open().lookup(UNIT, find_toolchain()) is None
        built = build()
        assert not built.was_cached
        entries[version] = built.entry
    assert len(Store.open().entries()) == 3
    # Without a toolchain the newest counts, by number and not by text.
    assert Store.open().lookup(UNIT) == entries["13.0.100"]
    shutil.rmtree(entries["13.0.100"].path)
    assert Store.open().lookup(UNIT) == entries["13.0.88"]
    assert Store.open().lookup(replace(UNIT, text="other")) is None


@pytest.mark.parametrize("without_toolchain", [False, True])
@pytest.mark.parametrize("damage", ["empty", "half", "gone", "flipped"])
@pytest.mark.parametrize("member", [*MEMBERS, MARKER])
def test_a_damaged_entry_is_set_aside_and_rebuilt(kit, caplog, member, damage, without_toolchain):
    entry = build().entry
    path = entry.path / member
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    store = Store.open()
    assert store.lookup(UNIT, None if without_toolchain else find_toolchain()) is None
    assert "the entry is broken" in caplog.text
    assert store.entries() == []
    built = build()
    assert not built.was_cached
    assert compiles(kit) == 2
    assert built.entry.path == entry.path
    aside = entry.path.with_name(f"{entry.name}.broken-{os.getpid()}")
    assert aside.is_dir()
    assert Store.open().entries() == [built.entry]
    assert build().was_cached


def test_several_broken_ones_are_all_kept(tmp_path):
    for _ in range(3):
        (build().entry.path / MARKER).unlink()
    build()
    names = [path.name for path in (tmp_path / "store" / "v1").iterdir() if ".broken-" in path.name]
    assert len(names) == 3


def test_an_entry_copied_under_another_name_is_no_hit():
    entry = build().entry
    other = build(replace(UNIT, text="// other\n")).entry
    shutil.rmtree(other.path)
    shutil.copytree(entry.path, other.path)
    assert Store.open().lookup(replace(UNIT, text="// other\n"), find_toolchain()) is None
    assert Store.open().lookup(UNIT) == entry


def test_layers_are_read_in_order_and_the_first_writable_is_written(monkeypatch, kit, tmp_path):
    layer_entry = build().entry
    layer = tmp_path / "layer"
    (tmp_path / "store").rename(layer)
    blocked = tmp_path / "file" / "store"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{blocked}:{tmp_path / 'own'}:{layer}")
    assert build().entry.path == layer / "v1" / layer_entry.name
    assert not (tmp_path / "own").exists()
    other = replace(UNIT, slug="fake.sm90a.other")
    assert build(other).entry.path.parent == tmp_path / "own" / "v1"
    assert {entry.slug for entry in Store.open().entries()} == {UNIT.slug, other.slug}
    assert compiles(kit) == 2
    # A broken entry of a lower layer is left alone and rebuilt in the writable one.
    (layer / "v1" / layer_entry.name / "kernel.cubin").write_bytes(b"")
    assert build().entry.path.parent == tmp_path / "own" / "v1"
    assert (layer / "v1" / layer_entry.name / "kernel.cubin").read_bytes() == b""
    assert [path.name for path in (layer / "v1").iterdir() if "broken" in path.name] == []


def test_an_unwritable_store_still_hits_and_a_miss_names_the_variable(monkeypatch, kit, tmp_path):
    entry = build().entry
    (tmp_path / "file").write_text("")
    roots = f"{tmp_path / 'file' / 'a'}:/proc/dsagen"
    monkeypatch.setenv("DSAGEN_CACHE_DIR", roots)
    with pytest.raises(StoreError) as caught:
        build()
    message = str(caught.value)
    assert "1 kernel is not in the store (fake.sm90a.x)" in message
    assert f"{tmp_path / 'file' / 'a'} (Not a directory), /proc/dsagen (" in message
    assert "Set DSAGEN_CACHE_DIR" in message
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{roots}:{tmp_path / 'store'}")
    assert build().entry == entry


CHILD = """
import os
from fake_toolchain import FakeUnit, install_kit
from dsagen.build import Store, build_units
from dsagen.errors import StoreError
if os.getuid() == 0:
    # After the imports, since the interpreter itself may lie where only root reads.
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = Store.open()
assert build_units([FakeUnit()], store)[0].was_cached
assert len(store.entries()) == 1
try:
    build_units([FakeUnit(slug="fake.sm90a.miss")], store)
except StoreError as error:
    print(error)
"""


def test_a_store_without_write_permission(tmp_path):
    entry = build().entry
    # Reachable by another user: root's own writes succeed whatever the permissions say.
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o005:
            folder.chmod(0o755)
    for folder, _, _ in os.walk(tmp_path / "store"):
        Path(folder).chmod(0o555)
    environment = knobs.child_environment(
        PYTHONPATH=f"{REPOSITORY}:{Path(__file__).parent}", PYTHONDONTWRITEBYTECODE="1"
    )
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=False)
    for folder, _, _ in os.walk(tmp_path / "store"):
        Path(folder).chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'store'} (Permission denied)" in done.stdout
    assert "DSAGEN_CACHE_DIR" in done.stdout
    assert entry.path.is_dir()


def test_nothing_is_written_inside_an_installed_package(monkeypatch, tmp_path):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "lib" / "site-packages" / "dsagen"))
    with pytest.raises(StoreError, match="inside an installed package"):
        build()
    assert not (tmp_path / "lib").exists()


def test_reading_creates_nothing(tmp_path):
    store = Store.open()
    assert store.lookup(UNIT) is None
    assert store.lookup(UNIT, find_toolchain()) is None
    assert store.entries() == []
    assert not (tmp_path / "store").exists()


def test_clear_removes_what_matches(tmp_path):
    kept = build(replace(UNIT, slug="topk.sm90a.x")).entry
    gone = build().entry
    (build(replace(UNIT, text="// b\n")).entry.path / MARKER).unlink()
    build(replace(UNIT, text="// b\n"))
    removed = Store.open().clear("fake.*")
    assert len(removed) == 3
    assert gone.name in removed
    assert Store.open().entries() == [kept]
    assert Store.open().clear() == [kept.name]
    assert [path.name for path in (tmp_path / "store" / "v1").iterdir() if not path.name.startswith(".")] == []
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []


def test_a_warm_lookup_takes_less_than_two_milliseconds():
    unit = replace(UNIT, text="// a line of a kernel as long as ours are\n" * 1500)
    build(unit)
    store, found = Store.open(), find_toolchain()
    for kit_or_none in (found, None):
        seconds = []
        for _ in range(21):
            start = time.perf_counter()
            assert store.lookup(unit, kit_or_none) is not None
            seconds.append(time.perf_counter() - start)
        assert statistics.median(seconds) < 0.002
