"""The README's generated blocks, each between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dsagen import knobs
from dsagen.cli.listing import support_matrix
from dsagen.cli.selection import select
from dsagen.cli.table import markdown
from dsagen.spec import shipped_specs

README = Path(__file__).resolve().parents[2] / "README.md"


def knob_table() -> list[str]:
    """Every environment knob."""
    rows = [
        (f"`{knob.name}`", knob.type_name.replace("|", ", "), knob.describe_default(), knob.doc)
        for knob in knobs.all_knobs()
    ]
    return markdown(rows, ("variable", "value", "default", "what it does"))


def support_table() -> list[str]:
    """Every kernel of the shipped specs with its rung."""
    return support_matrix(select(tuple(shipped_specs()), ()))


BLOCKS: dict[str, Callable[[], list[str]]] = {"knobs": knob_table, "support matrix": support_table}


def updated_readme(text: str) -> str:
    """The README with its blocks generated anew; an AssertionError when a block's markers are missing."""
    for name, generate in BLOCKS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        content = "\n".join(generate())
        text, count = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
        assert count == 1, f"README.md needs one block {name!r}, found {count}"
    return text
