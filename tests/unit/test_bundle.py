"""Bundles: packed, moved, loaded without toolkit and store; and every way in which a file may be none."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_driver import FakeDriver
from fake_toolchain import GOOD_LOG, install_kit, write_toolchain
from hypothesis import given, settings
from hypothesis import strategies as st

import dsagen
from dsagen.build import Store, build_units
from dsagen.build import bundle as bundle_module
from dsagen.build.bundle import MANIFEST, MEMBERS, is_bundle, read_bundle, write_bundle
from dsagen.build.store import is_entry_name
from dsagen.cli import main
from dsagen.errors import SpecError, StoreError
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.runtime import api, bundled
from dsagen.spec import load_spec

SPECS = ("v32_h16", "v32_h8")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two specs that share a kernel, compiled by a stand-in."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_kit(monkeypatch, folder)
        path = folder / "kernels.dsagen"
        pack(monkeypatch, folder, path)
        return path


def pack(monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path, made_by: str = "0.1.0") -> None:
    specs = [load_spec(name) for name in SPECS]
    units = [render(plan) for spec in specs for plan in expand(spec).plans()]
    # One log with a report on each, since the stand-in does not look at what it compiles.
    log = "".join(
        GOOD_LOG.replace("dsa_fake", unit.symbol).replace("168", str(unit.plan["registers_cap"])) for unit in units
    )
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(folder / "kit", log=log)))
    entries = {result.entry.slug: result.entry for result in build_units(units, Store.open())}
    rows = [(spec, ["sm_90a"], [entries[plan.slug] for plan in expand(spec).plans()]) for spec in specs]
    write_bundle(path, rows, made_by)


class KeepingDriver(FakeDriver):
    """Keeps the code that it is given; what it returns to launches is not asked for here."""

    def load_kernel(self, ordinal: int, cubin: bytes, symbol: str) -> str:
        assert cubin.startswith(b"\x7fELF")
        return super().load_kernel(ordinal, b"0", symbol)


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    """No compiler, no store, no home that can be written, and a device."""
    for name in ("DSAGEN_CACHE_DIR", "XDG_CACHE_HOME", "DSAGEN_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("HOME", "")
    driver = KeepingDriver()
    monkeypatch.setattr(api, "Kernels", partial(api.Kernels, open_driver=lambda: driver))
    return driver


# ---- what a bundle is for


def test_a_bundle_loads_where_there_is_nothing_else(packed, bare_machine, tmp_path):
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.copy(packed, moved)
    moved.chmod(0o444)
    kernels = dsagen.load(moved, name="v32_h16")
    kernels.prepare()
    kernels.freeze()
    assert kernels.spec == load_spec("v32_h16")
    assert len(bare_machine.loads) == 2
    assert dsagen.load(str(moved), name="v32_h8", archs=["sm_90a"]).spec.heads == 8
    assert [path.name for path in tmp_path.rglob("*")] == ["elsewhere", "renamed"]


def test_of_several_specs_one_is_named(packed, bare_machine):
    with pytest.raises(SpecError, match=r"2 specs in it: name one of v32_h16, v32_h8"):
        dsagen.load(packed)
    with pytest.raises(SpecError, match=r"no spec 'v32_h61' in it: name one of v32_h16, v32_h8"):
        dsagen.load(packed, name="v32_h61")
    with pytest.raises(SpecError, match="chooses among the specs of a bundle"):
        dsagen.load("v32_h16", name="v32_h16")


def test_what_a_bundle_has_not_is_an_error(packed, bare_machine):
    with pytest.raises(SpecError, match="packed for sm_90a, not for sm_100a"):
        dsagen.load(packed, name="v32_h16", archs=["sm_100a"])
    for archs in ("sm_90a", [], (), 5, {"sm_90a"}):
        with pytest.raises(SpecError, match=r"^archs: expected a list such as \['sm_90a'\], or None for all of them"):
            dsagen.load(packed, name="v32_h16", archs=archs)
    for options in ({"device": "emulator"}, {"emulator": dsagen.EmulatorOptions()}):
        with pytest.raises(StoreError, match="bundles have cubins and no PTX"):
            dsagen.load(packed, name="v32_h16", **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda unit: {"plan": {**unit.plan, "params_bytes": 8}}, "has another plan in it"),
        (lambda unit: {"text": unit.text + "int more;\n"}, "has another text in it"),
    ],
)
def test_kernels_of_another_dsagen_are_refused(packed, bare_machine, monkeypatch, change, words):
    monkeypatch.setattr(bundled, "render", lambda plan: replace(unit := render(plan), **change(unit)))
    with pytest.raises(StoreError, match=rf"{words}: it was packed by dsagen 0\.1\.0: pack it again"):
        dsagen.load(packed, name="v32_h16")


def test_a_bundle_with_another_body_says_what_asks_for_it(packed, bare_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "mma_sync")
    words = r"-mma_sync-\S+ is not in it, \S+-hopper-\S+ is, which DSAGEN_SPARSE_DECODE_BODY=hopper asks for"
    with pytest.raises(StoreError, match=words):
        dsagen.load(packed, name="v32_h16")
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    dsagen.load(packed, name="v32_h16")


def test_a_comment_makes_no_other_kernel(packed, bare_machine, monkeypatch):
    monkeypatch.setattr(bundled, "render", lambda plan: replace(unit := render(plan), text=unit.text + "// more\n"))
    dsagen.load(packed, name="v32_h16")


def test_flags_of_this_machine_do_not_matter(packed, bare_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_EXTRA_NVCC_FLAGS", "-DX")
    monkeypatch.setenv("CPATH", "/opt/include")
    dsagen.load(packed, name="v32_h16")


def test_equal_kernels_give_equal_files(monkeypatch, tmp_path):
    install_kit(monkeypatch, tmp_path)
    files = []
    for place in ("one", "another"):
        monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
        pack(monkeypatch, tmp_path, tmp_path / f"{place}.dsagen")
        files.append((tmp_path / f"{place}.dsagen").read_bytes())
    assert files[0] == files[1]
    assert str(tmp_path).encode() not in b"".join(member_bytes(tmp_path / "one.dsagen", ("kernel.cubin", "plan.json")))


def member_bytes(path: Path, members: tuple[str, ...]) -> list[bytes]:
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(members)]


def test_shared_kernels_are_packed_once_and_ptx_is_not(packed):
    found = read_bundle(packed)
    assert len(found.kernels) == 3
    assert len(set(found.specs[0].kernels) & set(found.specs[1].kernels)) == 1
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
    assert names[0] == MANIFEST and len(names) == 1 + 3 * len(MEMBERS)
    assert not [name for name in names if name.endswith((".ptx", ".log"))]


def test_a_bundle_is_replaced_in_one_step_and_nothing_else_is(monkeypatch, tmp_path, packed):
    install_kit(monkeypatch, tmp_path)
    target = tmp_path / "out.dsagen"
    target.write_text("precious")
    with pytest.raises(StoreError, match="exists and is no bundle, so it is not overwritten"):
        pack(monkeypatch, tmp_path, target)
    assert target.read_text() == "precious"
    shutil.copy(packed, target)
    pack(monkeypatch, tmp_path, target, made_by="0.2.0")
    assert read_bundle(target).made_by == "0.2.0"
    monkeypatch.setattr(
        bundle_module, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(StoreError, match="cannot be written \\(No space left on device\\)"):
        pack(monkeypatch, tmp_path, target)
    assert read_bundle(target).made_by == "0.2.0"
    assert [path.name for path in tmp_path.glob(".*.part")] == []
    for place in (tmp_path / "missing" / "x", tmp_path, Path("/" + "x" * 5000), Path("nul\0")):
        with pytest.raises(StoreError):
            pack(monkeypatch, tmp_path, place)


# ---- what is no bundle


def rewritten(packed: Path, target: Path, edit: Callable[[dict[str, bytes]], None], reseal: bool = True) -> Path:
    """The bundle with members changed; its comment is made to fit, as an attacker would."""
    with zipfile.ZipFile(packed) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    edit(contents)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.comment = comment
        if reseal:
            archive.comment = f"{bundle_module._COMMENT}{bundle_module._digest(contents[MANIFEST])}".encode()
    return target


def edited_manifest(change: Callable[[dict], None]) -> Callable[[dict[str, bytes]], None]:
    def edit(contents: dict[str, bytes]) -> None:
        manifest = json.loads(contents[MANIFEST])
        change(manifest)
        contents[MANIFEST] = json.dumps(manifest).encode()

    return edit


def first_cubin(contents: dict[str, bytes]) -> str:
    return next(name for name in contents if name.endswith("kernel.cubin"))


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/passwd", "kernels/../../evil", "kernels/a.0123456789ab/../x", "C:\\evil", "kernels/..", "evil",
     "kernels/../0123456789ab.0123456789ab/kernel.cubin", "kernels/.x.0123456789ab/kernel.cubin",
     "kernels/a.0123456789ab/kernel.ptx", "kernels/a.0123456789ab/kernel.cubin", "manifest.json/"],
)  # fmt: skip
def test_a_member_that_a_bundle_has_not_is_refused_by_name(packed, tmp_path, name):
    path = rewritten(packed, tmp_path / "bad", lambda contents: contents.update({name: b"x"}))
    with pytest.raises(StoreError, match="the bundle is broken, and nothing of it is used") as caught:
        read_bundle(path)
    assert name.replace("\\", "/").strip("/")[:10] in str(caught.value).replace("\\\\", "/")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update({first_cubin(c): c[first_cubin(c)] + b"x"}), "does not match its checksum"),
        (lambda c: c.pop(first_cubin(c)), "is not in both, the archive and its manifest"),
        (edited_manifest(lambda m: m.update(format=2)), "its format is 2, this dsagen reads 1"),
        (edited_manifest(lambda m: m.pop("kernels")), "lacks a part"),
        (edited_manifest(lambda m: m.pop("specs")), "lacks a part of a spec"),
        (edited_manifest(lambda m: m.update(specs=[])), "no spec is in it"),
        (edited_manifest(lambda m: m["specs"][0].update(kernels=["x"])), "x is not in it"),
        (edited_manifest(lambda m: m["specs"][0].update(spec=3)), "lacks a part of a spec"),
        (edited_manifest(lambda m: m["specs"][0]["spec"].update(heads=999)), "a spec in it is none for this dsagen"),
        (edited_manifest(lambda m: next(iter(m["kernels"].values())).pop("members")), "lacks a part of"),
        (edited_manifest(lambda m: next(iter(m["kernels"].values()))["stamp"].update(name="x")), "is another's"),
        (edited_manifest(lambda m: next(iter(m["kernels"].values()))["stamp"].update(arch=3)), "is another's"),
        (lambda c: c.update({MANIFEST: b"[" * 10**6}), "is no JSON object"),
        (lambda c: c.update({MANIFEST: b"\xff\xfe"}), "is no JSON object"),
        (lambda c: c.update({MANIFEST: b"[]"}), "is no JSON object"),
    ],
)
def test_a_forged_bundle_is_refused(packed, tmp_path, edit, words):
    with pytest.raises(StoreError) as caught:
        read_bundle(rewritten(packed, tmp_path / "bad", edit))
    assert words in str(caught.value)


def test_a_manifest_that_was_edited_by_hand_is_told(packed, tmp_path):
    edit = edited_manifest(lambda m: m.update(made_by="9.9.9"))
    with pytest.raises(StoreError, match=r"manifest\.json does not match its checksum"):
        read_bundle(rewritten(packed, tmp_path / "bad", edit, reseal=False))


def test_a_member_that_comes_twice_is_refused(packed, tmp_path):
    shutil.copy(packed, tmp_path / "bad")
    with zipfile.ZipFile(tmp_path / "bad", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(MANIFEST, b"{}")
    with pytest.raises(StoreError, match=r"'manifest\.json' a second time"):
        read_bundle(tmp_path / "bad")


def test_sizes_are_bounded_before_anything_is_unpacked(packed, tmp_path, monkeypatch):
    bomb = rewritten(packed, tmp_path / "bomb", lambda c: None)
    with zipfile.ZipFile(packed) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents[first_cubin(contents)] = b"\0" * (bundle_module.MOST_MEMBER_BYTES + 1)
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = f"{bundle_module._COMMENT}{bundle_module._digest(contents[MANIFEST])}".encode()
        for name, content in contents.items():
            archive.writestr(name, content)
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(StoreError, match=r"kernel\.cubin has 67108865 bytes, at most 67108864 are read"):
        read_bundle(bomb)
    limits = ("MOST_FILE_BYTES", "bytes, at most"), ("MOST_MEMBERS", "members, at"), ("MOST_DIRECTORY_BYTES", "members")
    for limit, words in limits:
        monkeypatch.setattr(bundle_module, limit, 3)
        with pytest.raises(StoreError, match=words):
            read_bundle(packed)
        monkeypatch.undo()
    monkeypatch.setattr(bundle_module, "MOST_MANIFEST_BYTES", 10)
    with pytest.raises(StoreError, match=r"manifest\.json has \d+ bytes, at most 10 are read"):
        read_bundle(packed)


def same(one: bundle_module.Bundle, other: bundle_module.Bundle) -> bool:
    return (one.specs, one.kernels, one.made_by) == (other.specs, other.kernels, other.made_by)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_is_ever_served(packed, tmp_path_factory, data):
    """Whatever bytes change or are missing: an error of the store, or exactly what was packed."""
    whole = packed.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "fill"]))
    at = data.draw(st.integers(0, len(whole) - 1) | st.integers(max(0, len(whole) - 3000), len(whole) - 1))
    content = bytearray(whole)
    if kind == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[at : at + data.draw(st.sampled_from([1, 4, 100, len(whole)]))]
    elif kind == "insert":
        content[at:at] = data.draw(st.binary(min_size=1, max_size=50))
    else:
        content[at : at + data.draw(st.integers(1, 64))] = b"\0" * 8
    path = tmp_path_factory.getbasetemp() / "damaged.dsagen"
    path.write_bytes(content)
    try:
        found = read_bundle(path)
    except StoreError as error:
        assert str(error).startswith(str(path))
    else:
        assert same(found, read_bundle(packed))


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200), with_magic=st.booleans())
def test_any_bytes_are_no_bundle(tmp_path_factory, content, with_magic):
    path = tmp_path_factory.getbasetemp() / "bytes.dsagen"
    path.write_bytes((b"PK\x03\x04" if with_magic else b"") + content)
    with pytest.raises(StoreError):
        read_bundle(path)


def test_other_files_are_no_bundles(tmp_path, packed):
    (tmp_path / "empty").write_bytes(b"")
    for path in (
        tmp_path,
        tmp_path / "empty",
        tmp_path / "missing",
        Path("/" + "x" * 5000),
        Path("nul\0"),
        Path(__file__),
    ):
        assert not is_bundle(path)
        with pytest.raises(StoreError):
            read_bundle(path)
    assert is_bundle(packed)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "hello")
    (tmp_path / "other.zip").write_bytes(buffer.getvalue())
    with pytest.raises(StoreError, match="does not end as a bundle does"):
        read_bundle(tmp_path / "other.zip")


def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", tmp_path / "loop", Path("/dev/zero"), Path("/dev/null"), Path("/proc/self/mem")):
        assert not is_bundle(path)
        with pytest.raises(StoreError, match=r"cannot be read|does not end as a bundle"):
            read_bundle(path)


def test_a_larger_end_record_is_not_believed(packed, tmp_path):
    """zipfile follows a zip64 locator before the end record, and whatever counts it leads to."""
    content = packed.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    (tmp_path / "zip64").write_bytes(content[:end] + b"PK\x06\x07" + bytes(16) + content[end:])
    with pytest.raises(StoreError, match="does not end as a bundle does"):
        read_bundle(tmp_path / "zip64")


@given(st.text(max_size=60))
def test_an_entry_name_leads_nowhere(text):
    for name in (text, f"{text}.0123456789ab"):
        if is_entry_name(name):
            assert not set(name) & set("/\\\0") and not name.startswith(".")
            assert (Path("/root") / name).parent == Path("/root")


# ---- the command line


def test_verify_says_what_is_in_a_bundle(packed, capsys, tmp_path):
    assert main(["verify", str(packed), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["bundles"]
    assert [spec["spec"]["name"] for spec in row["specs"]] == list(SPECS)
    assert len(row["kernels"]) == 3 and row["bytes"] == packed.stat().st_size
    assert main(["verify", str(packed)]) == 0
    out = capsys.readouterr().out
    assert "v32_h16 (sm_90a): v32, 16 heads" in out and "nvcc 13.0.88" in out
    assert main(["verify", str(packed), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    (tmp_path / "cut").write_bytes(packed.read_bytes()[:-1])
    assert main(["verify", str(packed), str(tmp_path / "cut")]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {tmp_path / 'cut'}: the bundle is broken")


def test_verify_looks_at_the_store(monkeypatch, tmp_path, capsys):
    install_kit(monkeypatch, tmp_path)
    pack(monkeypatch, tmp_path, tmp_path / "x.dsagen")
    assert main(["verify"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'store'}: 3 kernels whole, 0 broken\n"
    entry = Store.open().entries()[0]
    entry.cubin_path.write_bytes(b"")
    assert main(["verify"]) == 3
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'store'}: 2 kernels whole, 1 broken\n"
    assert f"{entry.name}: kernel.cubin (0 bytes) does not match its checksum" in captured.err
    assert main(["verify", "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)["store"]
    assert len(row["whole"]) == 2 and list(row["broken"]) == [entry.name]


@pytest.mark.compile
def test_a_real_bundle_from_the_command_line(session_store, tmp_path, capsys, request):
    output = tmp_path / "kernels.dsagen"
    assert main(["bundle", "v32_h16", "--arch", "sm_90a", "-o", str(output), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["bundles"]
    assert {kernel["arch"] for kernel in row["kernels"]} == {"sm_90a"}
    cubins = member_bytes(output, ("kernel.cubin",))
    assert len(cubins) == 2 and all(cubin.startswith(b"\x7fELF") for cubin in cubins)
    device = request.getfixturevalue("bare_machine")
    dsagen.load(output).prepare()
    assert len(device.loads) == 2


@pytest.mark.parametrize("front", [b"\0", None], ids=["a byte", "a bundle"])
def test_nothing_lies_in_front_of_a_bundle(packed, tmp_path, front):
    content = packed.read_bytes()
    longer = tmp_path / "longer.dsagen"
    longer.write_bytes((content if front is None else front) + content)
    with pytest.raises(StoreError, match=r"bytes lie in front of it|does not end as a bundle does|no bundle"):
        read_bundle(longer)
