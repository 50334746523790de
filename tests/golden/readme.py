"""The README's generated blocks, each between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from dsagen import knobs
from dsagen.arch import ARCHS
from dsagen.cli.listing import REFUSED, support_matrix
from dsagen.cli.selection import select
from dsagen.cli.table import markdown
from dsagen.evidence import Rung
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.spec import load_spec, shipped_specs

README = Path(__file__).resolve().parents[2] / "README.md"


def knob_table() -> list[str]:
    """Every environment knob."""
    rows = [
        (f"`{knob.name}`", knob.type_name.replace("|", ", "), knob.describe_default(), knob.doc)
        for knob in knobs.all_knobs()
    ]
    return markdown(rows, ("variable", "value", "default", "what it does"))


@cache
def support_table() -> list[str]:
    """Every kernel of the shipped specs with its rung."""
    return support_matrix(select(tuple(shipped_specs()), ()))


def arch_table() -> list[str]:
    """Every shipped spec and arch with the rung that all kernels of the spec reached there.

    `emulated` is what the quick tier of the emulator's tests runs: the same main kernel, or the op's body on that arch.
    """
    recorded, emulated = recorded_rungs(), emulated_slugs()
    table = []
    for name in shipped_specs():
        matrix = expand(load_spec(name).replace(archs=list(ARCHS)))
        plans, refused = matrix.plans(), {cell.arch for cell in matrix.refused}
        cells = []
        for arch in ARCHS:
            rung = recorded.get((name, arch), Rung.PLANNED)
            if rung < Rung.EMULATED and emulated.issuperset(main_slugs(p for p in plans if p.variant.arch == arch)):
                rung = Rung.EMULATED
            cells.append("refused" if arch in refused else rung.name.lower())
        table.append((name, *cells))
    return markdown(table, ("spec", *ARCHS))


def recorded_rungs() -> dict[tuple[str, str], Rung]:
    """By spec and declared arch, the lowest rung that the table of kernels shows."""
    found: dict[tuple[str, str], Rung] = {}
    for line in support_table()[2:]:
        spec, _, arch, _, text = line.strip("| ").split(" | ")[:5]
        rung = Rung.PLANNED if text == REFUSED else Rung[text.split()[0].upper()]
        found[spec, arch] = min(rung, found.get((spec, arch), rung))
    return found


def main_slugs(plans: Iterable[KernelPlan]) -> set[str]:
    """Slugs without those of combines, which come with every split call."""
    return {plan.slug for plan in plans if plan.variant.kernel != "combine"}


def emulated_slugs() -> set[str]:
    """Slugs of the kernels that the emulated conformance tests run."""
    folder = str(README.parent / "tests" / "emulator")
    if folder not in sys.path:
        sys.path.append(folder)
    suites = importlib.import_module("test_conformance_emulated").SUITES
    return {slug for suite in suites for slug in main_slugs(suite.plans())}


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "knobs": knob_table,
    "support matrix": support_table,
    "archs": arch_table,
}


def updated_readme(text: str) -> str:
    """The README with its blocks generated anew; an AssertionError when a block's markers are missing."""
    for name, generate in BLOCKS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        content = "\n".join(generate())
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        assert count == 1, f"README.md needs one block {name!r}, found {count}"
    return text
