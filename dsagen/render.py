"""Rendering: a kernel plan becomes one complete CUDA text, our headers inlined.

Templates print and do not compute; what they print comes from the plan. Jinja's usual delimiters occur in CUDA and PTX
text, so they are `<% %>`, `${ }` and `<# #>` here.

Lines of a header between `//% if parts.NAME` and `//% endif` are in the units of plans that have that part, and leave
no trace in others: what one kernel does besides costs its neighbours neither an instruction nor their text, by which
what a device showed of them is known.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from dsagen.errors import DsagenError
from dsagen.plan import KernelPlan

# Every family's unit: a plan says what is in it.
_UNIT_TEMPLATE = "kernel.cu.j2"
_INCLUDE = re.compile(r'^#include "([^"]+)"$')
_LINE_STATEMENT = "//%"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class RenderedUnit:
    """One kernel as text. `text` includes nothing; `variant` and `plan` are plain data of what it was rendered from."""

    slug: str
    symbol: str
    arch: str
    text: str
    variant: dict[str, Any]
    plan: dict[str, Any]

    @property
    def evidence_hash(self) -> str:
        """Hash of the text without comments, blank lines and indentation: what a record of a device run is keyed by."""
        return instruction_hash(self.text)


def instruction_hash(text: str) -> str:
    """16 hex digits that change when an instruction may change, and not for a comment or a blank line."""
    lines = (" ".join(line.split()) for line in _COMMENT.sub("", text).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


@cache
def templates_folder() -> Path:
    """Where templates lie: in the installed package, else in the checkout."""
    packaged = Path(__file__).parent / "_data" / "templates"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "templates"
    if not folder.is_dir():
        raise DsagenError(f"templates not found: looked in {packaged} and {folder}; the installation is incomplete")
    return folder


def read_header(name: str) -> str:
    """Text of a header or template by its name relative to the templates folder."""
    path = templates_folder() / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DsagenError(f"template {name!r} cannot be read: {error}") from None


def leading_comment(name: str) -> list[str]:
    """The comment that a header begins with, without its slashes: of a kernel's body, its roles and barriers drawn."""
    lines = []
    for line in read_header(name).splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").removeprefix(" ").rstrip())
    return lines


def inline_headers(text: str, read: Callable[[str], str] = read_header) -> str:
    """Replace each `#include "name"` by the named header, once, at its first place; `#pragma once` lines go."""
    seen: set[str] = set()

    def lines_of(source: str) -> Iterable[str]:
        for line in source.splitlines():
            match = _INCLUDE.match(line)
            if match is None:
                if line != "#pragma once":
                    yield line
            elif match[1] not in seen:
                seen.add(match[1])
                yield f"// ---- {match[1]}"
                yield from lines_of(read(match[1]))

    return "\n".join(lines_of(text)) + "\n"


@cache
def environment() -> jinja2.Environment:
    """The one jinja environment: undefined names are errors, delimiters do not collide with CUDA."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(read_header),
        undefined=jinja2.StrictUndefined,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        line_statement_prefix=_LINE_STATEMENT,
        autoescape=False,  # the output is CUDA, and every value comes from a validated plan
    )


@cache
def _header_template(text: str) -> jinja2.Template:
    return environment().from_string(text)


def with_parts(text: str, parts: Mapping[str, bool]) -> str:
    """A header with those of its parts that are asked for; UndefinedError for one of which `parts` says nothing."""
    # Few headers have any, and jinja takes longer than all else here.
    return _header_template(text).render(parts=parts) if _LINE_STATEMENT in text else text


def constant_text(value: int | float) -> str:
    """A constant as a C++ literal."""
    if isinstance(value, float):
        return f"{value.hex()}f" if value else "0.0f"
    return str(value)


def render(plan: KernelPlan, read: Callable[[str], str] = read_header) -> RenderedUnit:
    """Render a plan. `read` gives header texts and may be replaced, for example by a model of the prims on a CPU."""
    constants = [
        (name, "float" if isinstance(value, float) else "int", constant_text(value)) for name, value in plan.constants
    ]
    printed = environment().get_template(_UNIT_TEMPLATE).render(plan=plan, constants=constants)
    parts, data = dict(plan.parts), plan.to_json()
    text = inline_headers(printed, lambda name: with_parts(read(name), parts))
    return RenderedUnit(plan.slug, plan.symbol, plan.variant.arch, text, data["variant"], data)
