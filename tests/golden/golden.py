"""The golden texts: what a reviewer reads when a plan, a kernel or the support matrix changes.

`pytest tests/golden --update-golden` rewrites all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dsagen.arch import ARCHS
from dsagen.cli.selection import Selection, matrix_lines
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import load_spec, shipped_specs

FOLDER = Path(__file__).resolve().parent
# Where a unit's text stops to be data printed from the plan, and our headers begin.
HEADERS_BEGIN = "// ---- "


@cache
def golden_texts() -> dict[str, str]:
    """File name -> text that it should hold."""
    texts = {"matrix.txt": matrix_text(declared_archs=True), "matrix_all_archs.txt": matrix_text(declared_archs=False)}
    for plan in representative_plans():
        texts[f"{plan.slug}.txt"] = unit_text(plan)
    return texts


def matrix_text(declared_archs: bool) -> str:
    """The matrices of all shipped specs, for the archs that they declare or for every arch there is."""
    selections = []
    for name in shipped_specs():
        spec = load_spec(name)
        spec = spec if declared_archs else spec.replace(archs=list(ARCHS))
        selections.append(Selection(spec, expand(spec)))
    return "\n".join(matrix_lines(selections)) + "\n"


def representative_plans() -> Iterator[KernelPlan]:
    """The first plan of each family, role, body, pair of KV formats and format of index keys in the shipped specs.

    Of sparse decode and the indexer's logits those of the body that other archs have, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        for op in ("SPARSE_DECODE", "INDEXER_LOGITS"):
            patch.setenv(f"DSAGEN_{op}_BODY", "mma_sync")
        plans = [plan for name in shipped_specs() for plan in expand(load_spec(name)).plans()]
    plans += [plan for name in shipped_specs() for plan in expand(load_spec(name)).plans()]
    seen = set()
    for plan in plans:
        variant, axes = plan.variant, dict(plan.variant.axes)
        key = (variant.family, variant.kernel, variant.body, axes.get("kv"), axes.get("xkv"), axes.get("keys"))
        if key not in seen:
            seen.add(key)
            yield plan


def unit_text(plan: KernelPlan) -> str:
    """What a unit prints from its plan, word for word; its headers and body are present as a hash of the whole.

    The hash leaves comments out, so it moves exactly when device evidence is lost.
    """
    unit = render(plan)
    return f"evidence hash {unit.evidence_hash}\n\n" + "\n".join(printed_part(unit.text)).rstrip() + "\n"


def printed_part(text: str) -> list[str]:
    """The lines before the first header, the constants and structs, and everything after the last header's aliases."""
    kept: list[str] = []
    keeping = True
    for line in text.splitlines():
        if line.startswith(HEADERS_BEGIN):
            keeping = False
        elif line.startswith(("struct Constants", "using Encoding", "using Score", "using Codes", "using Body")):
            keeping = True
        if keeping:
            kept.append(line)
    return kept
