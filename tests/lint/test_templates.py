"""Device code: asm in one place, headers in layers, templates that print and do not compute."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import jinja2.nodes
import pytest

from dsagen.render import environment, with_parts

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
DEVICE_FILES = sorted(path for path in TEMPLATES.rglob("*") if path.suffix in (".cuh", ".cu", ".j2"))
# Templates, and headers that have parts.
JINJA_FILES = [path for path in DEVICE_FILES if path.suffix == ".j2" or "//%" in path.read_text()]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")
_INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)

# Printing: text, names and their attributes, loops over them, and whether one is there.
PURE_NODES = (
    jinja2.nodes.Template,
    jinja2.nodes.Output,
    jinja2.nodes.TemplateData,
    jinja2.nodes.For,
    jinja2.nodes.If,
    jinja2.nodes.Name,
    jinja2.nodes.Tuple,
    jinja2.nodes.Getattr,
)
# Names that a template's loops bind to strings that hold an include path printed from the plan.
_PRINTED = re.compile(r"\$\{.*?\}")


def relative_name(path: Path) -> str:
    return path.relative_to(TEMPLATES).as_posix()


def uses_asm(text: str) -> bool:
    return _ASM.search(_COMMENT.sub("", text)) is not None


# What a family's bodies take of another's: the order of scores, by which those that are counted are selected from.
OF_OTHERS = {("indexer_logits", "topk/score.cuh")}


def allowed_include(including: str, included: str) -> bool:
    """prims/ptx <- prims/{tile,kv} <- the family's bodies <- its template."""
    if including.startswith("prims/ptx/"):
        return included.startswith("prims/ptx/") or included == "prims/types.cuh"
    if including.startswith("prims/"):
        return included.startswith("prims/")
    family = including.split("/")[0]
    return included.startswith(("prims/", family + "/")) or (family, included) in OF_OTHERS


def impure_nodes(source: str) -> list[str]:
    tree = environment().parse(source)
    return [type(node).__name__ for node in tree.find_all(jinja2.nodes.Node) if not isinstance(node, PURE_NODES)]


@pytest.mark.parametrize("path", DEVICE_FILES, ids=relative_name)
def test_asm_only_in_ptx_prims(path: Path) -> None:
    assert relative_name(path).startswith("prims/ptx/") or not uses_asm(path.read_text())


@pytest.mark.parametrize("path", DEVICE_FILES, ids=relative_name)
def test_includes_point_down_and_are_ours(path: Path) -> None:
    for bracket, included in _INCLUDE.findall(_PRINTED.sub("", path.read_text())):
        if included:
            assert bracket == '"', f"<{included}>: only our own headers, so that the text is complete"
            assert allowed_include(relative_name(path), included), included
            assert (TEMPLATES / included).is_file()


@pytest.mark.parametrize("path", JINJA_FILES, ids=relative_name)
def test_templates_print_and_do_not_compute(path: Path) -> None:
    assert impure_nodes(path.read_text()) == []


def test_parts_of_headers_are_there_or_leave_no_trace() -> None:
    header = "int a;\n//% if parts.more\n  int b;\n//% else\n  int c;\n//% endif\nint d;\n"
    assert with_parts(header, {"more": True}) == "int a;\n  int b;\nint d;\n"
    assert with_parts(header, {"more": False}) == "int a;\n  int c;\nint d;\n"
    with pytest.raises(jinja2.UndefinedError, match="more"):
        with_parts(header, {"other": True})


def test_undefined_names_are_errors() -> None:
    assert environment().undefined is jinja2.StrictUndefined
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("${ nothing }").render()


@pytest.mark.parametrize(
    "source",
    ["${ a + 1 }", "${ a | upper }", "${ a.b() }", "<% set a = 1 %>", "<% if a == 2 %><% endif %>", "${ a[0] }"],
)
def test_the_purity_rule_finds_computation(source: str) -> None:
    assert impure_nodes(source) != []


def test_the_asm_rule_sees_through_comments() -> None:
    assert uses_asm('asm volatile("");')
    assert not uses_asm("// no asm here\n/* asm */ int plasma;")


def test_the_include_rule_knows_its_direction() -> None:
    assert not allowed_include("prims/ptx/mma.cuh", "prims/tile/gather.cuh")
    assert not allowed_include("prims/kv/bf16.cuh", "sparse_decode/mma_sync.cuh")
    assert not allowed_include("other/body.cuh", "sparse_decode/mma_sync.cuh")
    assert not allowed_include("indexer_logits/store.cuh", "topk/row.cuh")
    assert allowed_include("sparse_decode/mma_sync.cuh", "prims/tile/gather.cuh")
