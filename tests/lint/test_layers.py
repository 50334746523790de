"""Imports point down only, and each heavy dependency enters in its own layer."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dsagen"

# Lowest first; a module may import from its own layer and from those before it.
LAYERS = (
    ("leaf", ("errors", "knobs", "log", "kept_library", "ending", "output_paths", "quantity")),
    (
        "facts",
        (
            "spec",
            "spec_defaults",
            "spec_problems",
            "spec_source",
            "spec_values",
            "slug",
            "arch",
            "kv_format",
            "kv_record",
            "kv_rule",
            "index_format",
            "index_rule",
            "dtype",
            "model",
            "tensor_map",
        ),
    ),
    ("core", ("matrix", "plan", "guard", "limits", "family", "dependent", "division", "occupancy")),
    ("families", ("families",)),
    ("render", ("render",)),
    ("build", ("build",)),
    ("emulator", ("emulator",)),
    ("runtime", ("runtime",)),
    ("integrations", ("compat", "torch_ops")),
    ("tools", ("check", "bench", "tune", "evidence")),
    ("cli", ("cli", "__main__")),
)
RANK = {module: rank for rank, (_, modules) in enumerate(LAYERS) for module in modules}
# `from dsagen import load` reaches the runtime; every other name there is a module.
ROOT_NAMES = {"load": "runtime", "DeploymentSpec": "spec", "__version__": "errors"}

# Where a third-party package may be imported, as path patterns below dsagen/.
ALLOWED_IN = {
    "torch": r"runtime/|compat/|torch_ops\.py|families/\w+/(model_)?reference\.py|check/|bench/",
    "cuda": r"runtime/|compat/|torch_ops\.py|check/|bench/",
    "jinja2": r"render\.py",
    "click": r"cli/",
    "pydantic": r"spec\w*\.py",
    "yaml": r"spec\w*\.py",
    "rich": r"build/progress\.py|cli/|check/|bench/",
    "ninja": r"build/",
    "matplotlib": r"bench/plots\.py",
}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            if node.module == "dsagen":
                yield from (f"dsagen.{ROOT_NAMES.get(alias.name, alias.name)}" for alias in node.names)
            else:
                yield str(node.module)


def upward_imports(relative: str, tree: ast.AST) -> list[str]:
    own = RANK[relative.split("/")[0].removesuffix(".py")]
    targets = [name.split(".")[1] for name in imported_modules(tree) if name.startswith("dsagen.")]
    return [target for target in targets if RANK.get(target, len(LAYERS)) > own]


def misplaced_imports(relative: str, tree: ast.AST) -> list[str]:
    packages = {name.split(".")[0] for name in imported_modules(tree)}
    return [package for package in packages & set(ALLOWED_IN) if not re.match(ALLOWED_IN[package], relative)]


def relative_name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", [path for path in SOURCES if path != PACKAGE / "__init__.py"], ids=relative_name)
def test_imports_point_down(path: Path) -> None:
    assert upward_imports(relative_name(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", SOURCES, ids=relative_name)
def test_heavy_packages_enter_in_their_layer(path: Path) -> None:
    assert misplaced_imports(relative_name(path), ast.parse(path.read_text())) == []


def test_the_emulator_knows_no_family() -> None:
    # It runs any PTX, so it may be used from every layer above the facts.
    for path in (PACKAGE / "emulator").rglob("*.py"):
        targets = {name.split(".")[1] for name in imported_modules(ast.parse(path.read_text())) if "dsagen." in name}
        assert {target for target in targets if target != "emulator" and RANK[target] > RANK["spec"]} == set()


def test_every_module_has_a_layer() -> None:
    tops = {relative_name(path).split("/")[0].removesuffix(".py") for path in SOURCES} - {"__init__"}
    assert tops <= set(RANK)


def test_the_front_door_imports_nothing_at_its_top() -> None:
    path = PACKAGE / "__init__.py"
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in top for name in imported_modules(ast.Module([node], []))}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"dsagen"}
    assert {name.split(".")[1] for name in names if name.startswith("dsagen.")} <= set(LAYERS[0][1])


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*project["dependencies"], *project["optional-dependencies"]["plots"]]
    declared = {re.split(r"[\[<>=!~ ]", text)[0].lower() for text in everything}
    distribution_of = {"yaml": "pyyaml", "cuda": "cuda-python", "pydantic_core": "pydantic"}
    for path in SOURCES:
        for name in imported_modules(ast.parse(path.read_text())):
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names and package != "dsagen":
                assert distribution_of.get(package, package) in declared, f"{relative_name(path)} imports {package}"


@pytest.mark.parametrize(
    ("relative", "code", "upward", "misplaced"),
    [
        ("slug.py", "from dsagen.matrix import expand", ["matrix"], []),
        ("plan.py", "def f():\n    import dsagen.build.store", ["build"], []),
        ("build/store.py", "from dsagen import load", ["runtime"], []),
        ("render.py", "import torch.nn", [], ["torch"]),
        ("family.py", "import jinja2", [], ["jinja2"]),
        ("cli/app.py", "from cuda.bindings import driver", [], ["cuda"]),
        ("runtime/api.py", "import torch\nfrom dsagen.build import Store", [], []),
    ],
)
def test_the_rules_find_what_they_forbid(relative: str, code: str, upward: list[str], misplaced: list[str]) -> None:
    tree = ast.parse(code)
    assert (upward_imports(relative, tree), misplaced_imports(relative, tree)) == (upward, misplaced)
