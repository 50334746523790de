"""What holds for any input: of specs, of words on the command line, and of a store that something else has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fake_toolchain import FakeUnit, install_kit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsagen.arch import ARCHS
from dsagen.build import Store, build_units, find_toolchain
from dsagen.build.entry import MARKER, MEMBERS
from dsagen.cli import main
from dsagen.errors import SpecError
from dsagen.index_rule import INDEX_RULES
from dsagen.kv_format import KV_FORMATS
from dsagen.kv_rule import WRITE_RULES
from dsagen.matrix import expand
from dsagen.model import CUSTOM, MODELS
from dsagen.render import render
from dsagen.slug import parse_slug, symbols_for
from dsagen.spec import DeploymentSpec, known_ops, load_spec

# ---- specs


@st.composite
def spec_mappings(draw: st.DrawFn) -> dict[str, object]:
    """Mappings with the keys of a spec, each with values that it could have; most are specs."""
    model = draw(st.sampled_from(sorted(MODELS)))
    ops = draw(st.lists(st.sampled_from(known_ops()), min_size=1, unique=True))
    data: dict[str, object] = {
        "model": model,
        "heads": draw(st.integers(1, 128)),
        "archs": draw(st.lists(st.sampled_from(list(ARCHS)), min_size=1, max_size=4, unique=True)),
        "ops": ops,
    }
    if model == CUSTOM or draw(st.booleans()):
        data["kv"] = draw(st.sampled_from(sorted(KV_FORMATS)))
    if model == CUSTOM or draw(st.booleans()):
        data["topk"] = draw(st.integers(1, 1 << 20))
    if draw(st.booleans()):
        data["extra_kv"] = draw(
            st.just("none")
            | st.fixed_dictionaries({"format": st.sampled_from(sorted(KV_FORMATS)), "topk": st.just(512)})
        )
    if draw(st.booleans()):
        data["determinism"] = draw(st.sampled_from(["off", "batch_invariant"]))
    if "topk" in ops:
        data["scores"] = draw(st.sampled_from(["fp32", "bf16"]))
    if "kv_cache" in ops:
        rules = st.sampled_from(sorted(WRITE_RULES))
        data["kv_write"] = {"rows": draw(st.sampled_from(["bf16", "fp16", "fp32"])), "rule": draw(rules)}
    if "index_cache" in ops:
        rules = st.sampled_from(INDEX_RULES)
        data["index_write"] = {"rows": draw(st.sampled_from(["bf16", "fp16", "fp32"])), "rule": draw(rules)}
    return data


def spec_or_none(data: dict[str, object]) -> DeploymentSpec | None:
    try:
        return load_spec(data)
    except SpecError as error:
        # A refusal names the key that it is about.
        assert any(
            str(key) in str(error)
            for key in ("model", "heads", "archs", "ops", "kv", "topk", "dims", "scores", "index")
        )
        return None


@settings(max_examples=150, deadline=None)
@given(spec_mappings())
def test_a_valid_spec_has_a_matrix_whose_kept_cells_can_be_rendered(data):
    spec = spec_or_none(data)
    if spec is None:
        return
    matrix = expand(spec)
    assert {cell.op for cell in matrix.cells} == set(spec.ops)
    assert {cell.arch for cell in matrix.cells} == set(spec.archs)
    for cell in matrix.cells:
        assert cell.kept is not bool(cell.refusal)
    plans = matrix.plans()
    assert {plan.slug for plan in plans} == {cell.variant.slug for cell in matrix.cells if cell.kept and cell.variant}
    symbols_for([plan.slug for plan in plans])
    for plan in plans:
        assert str(parse_slug(plan.slug)) == plan.slug
    for plan in plans[:2]:
        unit = render(plan)
        assert unit.symbol in unit.text and "#include" not in unit.text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(max_size=120)
    | st.builds(
        "model: {}\nheads: {}\narchs: [{}]\nops: [{}]\n{}".format,
        st.sampled_from(["v32", "v4", "v41", "x", "", "{", "[]"]),
        st.sampled_from(["16", "-1", "1e9", "x", "", "16.0", "0x10"]),
        st.sampled_from(["sm_90a", "sm_90", "90", "", "sm_90a, sm_90a", "sm_80"]),
        st.sampled_from(["sparse_decode", "topk", "x", "", "sparse_decode, topk"]),
        st.text(max_size=30),
    )
)
def test_no_text_of_a_spec_makes_a_traceback(tmp_path, capsys, text):
    path = tmp_path / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
    code = main(["list", str(path), "--json"])
    captured = capsys.readouterr()
    assert code in (0, 2)
    assert (code == 0) == (captured.err == "") == bool(captured.out)
    assert code == 0 or captured.err.startswith(f"error: {path}")


COMMANDS = ["list", "explain", "render", "schema", "verify", "clear", "completion", "compile-commands"]
OPTIONS = [
    "--json",
    "--arch",
    "--quiet",
    "-v",
    "-o",
    "--html",
    "--batch",
    "--dry-run",
    "--help",
    "--version",
    "--",
    "-",
]
WORDS = [*COMMANDS, *OPTIONS, "v32_h16", "sm_90a", "3", "..", "/dev/null"]


@settings(max_examples=150, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=5))
def test_no_arguments_make_a_traceback(words, tmp_path_factory):
    here, folder = Path.cwd(), tmp_path_factory.getbasetemp() / "arguments"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        code = main(words)
    finally:
        os.chdir(here)
    assert code in (0, 1, 2, 3)


# ---- the store


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory):
    """A store with two entries of one slug and one of another, and how it is found."""
    folder = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_kit(monkeypatch, folder)
        units = [FakeUnit(), FakeUnit(text="// another\n"), FakeUnit(slug="fake.sm90a.y")]
        for unit in units:
            build_units([unit], Store.open())
        yield folder, units, find_toolchain()


def contents(store: Store, units, toolchain) -> list[tuple[bytes, ...] | None]:
    """What a loader would read of each unit, found with and without a compiler."""
    found = []
    for unit in units:
        for kit in (toolchain, None):
            entry = store.lookup(unit, kit)
            found.append(None if entry is None else tuple(entry.read(member) for member in MEMBERS))
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_store_never_serves_what_was_not_built(pristine, tmp_path_factory, data):
    """Any member of any entry is changed, cut, swapped with another's, or an entry is renamed: a miss, or the truth."""
    folder, units, toolchain = pristine
    root = tmp_path_factory.getbasetemp() / "damaged-store"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder / "store", root)
    entries = sorted(path for path in (root / "v1").iterdir() if not path.name.startswith("."))
    for _ in range(data.draw(st.integers(1, 3))):
        damage(data, entries)
    truth = contents(Store([folder / "store"]), units, toolchain)
    for served, built in zip(contents(Store([root]), units, toolchain), truth, strict=True):
        assert served in (None, built)
    if data.draw(st.integers(0, 39)) == 17:  # and it heals; seldom, for a build takes its time
        for unit in units:
            (result,) = build_units([unit], Store([root]), lambda: toolchain)
            assert result.entry.source_path.read_text() == unit.text


def damage(data: st.DataObject, entries: list[Path]) -> None:
    entry = data.draw(st.sampled_from(entries))
    member = data.draw(st.sampled_from([*MEMBERS, MARKER]))
    path = entry / member
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "remove", "swap", "rename", "fill"]))
    other = data.draw(st.sampled_from(entries))
    if kind == "rename":
        if other.exists() and entry.exists() and other != entry:
            shutil.rmtree(other)
            entry.rename(other)
        return
    if not path.is_file():
        return
    content = bytearray(path.read_bytes())
    if kind == "flip" and content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content))) :]
    elif kind == "grow":
        content += data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "fill":
        content[:] = bytes(len(content))
    elif kind == "swap" and (other / member).is_file():
        content[:] = (other / member).read_bytes()
    if kind == "remove":
        path.unlink()
    else:
        path.write_bytes(content)
