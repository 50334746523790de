"""Slugs: the one name of a kernel, printed from every compile-time axis and parsed back without loss.

    sparse_decode-main-mma_sync-sm_90a-kv.v32-dqk.576-dv.512-n.16-smem.227
    family-kernel-body-arch, then one `name.value` per axis in the order in which the family declares them

A slug is the file name, the prefix of the store entry and (as `dsa_...`) the symbol, so two kernels that differ must
never share one: anything that cannot be printed without loss is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsagen.errors import SpecError

SYMBOL_PREFIX = "dsa_"
# A file name may have 255 bytes; the store appends a digest and, while it writes, a private suffix.
MAX_SLUG_CHARS = 200

_WORD = re.compile(r"[a-z][a-z0-9_]*\Z", re.ASCII)
_TEXT_VALUE = re.compile(r"[a-z0-9_]*[a-z_][a-z0-9_]*\Z", re.ASCII)
_INT_VALUE = re.compile(r"(0|[1-9][0-9]*)\Z", re.ASCII)

AxisValue = str | int


@dataclass(frozen=True)
class Slug:
    """The parts of a slug; `axes` keeps the declared order, integers as int."""

    family: str
    kernel: str
    body: str
    arch: str
    axes: tuple[tuple[str, AxisValue], ...]

    def __str__(self) -> str:
        return make_slug(self.family, self.kernel, self.body, self.arch, self.axes)


def make_slug(family: str, kernel: str, body: str, arch: str, axes: Iterable[tuple[str, AxisValue]]) -> str:
    """Print a slug. SpecError for anything that would not parse back to the same parts.

    Words are lower-case ASCII letters, digits and underscores, starting with a letter. An axis value is a
    non-negative int or text of the same characters that does not read as a number.
    """
    parts = [
        _word(what, text) for what, text in (("family", family), ("kernel", kernel), ("body", body), ("arch", arch))
    ]
    seen: set[str] = set()
    for name, value in axes:
        _word("axis name", name)
        if name in seen:
            raise SpecError(f"slug: axis {name!r} occurs twice")
        seen.add(name)
        parts.append(f"{name}.{_print_value(name, value)}")
    slug = "-".join(parts)
    if len(slug) > MAX_SLUG_CHARS:
        raise SpecError(f"slug: {len(slug)} characters, at most {MAX_SLUG_CHARS} fit a file name: {slug}")
    return slug


def parse_slug(slug: str) -> Slug:
    """The parts of a slug; SpecError when `make_slug` could not have printed it."""
    parts = slug.split("-")
    if len(parts) < 4:
        raise SpecError(f"slug {slug!r}: expected family-kernel-body-arch[-axis.value ...], found {len(parts)} part(s)")
    axes: list[tuple[str, AxisValue]] = []
    for part in parts[4:]:
        name, dot, text = part.partition(".")
        if not dot:
            raise SpecError(f"slug {slug!r}: {part!r} is not of the form axis.value")
        axes.append((name, int(text) if _INT_VALUE.match(text) else text))
    parsed = Slug(parts[0], parts[1], parts[2], parts[3], tuple(axes))
    make_slug(parsed.family, parsed.kernel, parsed.body, parsed.arch, parsed.axes)
    return parsed


def slug_symbol(slug: str) -> str:
    """The C symbol of a slug's kernel: `dsa_` and the slug with '-' and '.' as '_'.

    Distinct slugs can meet in one symbol; `symbols_for` checks a set of them.
    """
    parse_slug(slug)
    return SYMBOL_PREFIX + slug.replace("-", "_").replace(".", "_")


def symbols_for(slugs: Iterable[str]) -> dict[str, str]:
    """Symbol by slug, in the given order; SpecError when two slugs share a symbol or a slug occurs twice."""
    symbols: dict[str, str] = {}
    owners: dict[str, str] = {}
    for slug in slugs:
        if slug in symbols:
            raise SpecError(f"slug {slug!r} occurs twice: two kernels would overwrite each other")
        symbol = slug_symbol(slug)
        if symbol in owners:
            raise SpecError(f"slugs {owners[symbol]!r} and {slug!r} share the symbol {symbol!r}: rename one axis")
        owners[symbol] = slug
        symbols[slug] = symbol
    return symbols


def _word(what: str, text: str) -> str:
    if not isinstance(text, str) or not _WORD.match(text):
        raise SpecError(f"slug: {what} {text!r} is not of the form [a-z][a-z0-9_]*")
    return text


def _print_value(name: str, value: AxisValue) -> str:
    # bool is an int to Python, but printing True as 1 would not come back as True.
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise SpecError(f"slug: axis {name!r} has the negative value {value}: only 0 and above can be printed")
        return str(value)
    if isinstance(value, str):
        if _TEXT_VALUE.match(value):
            return value
        raise SpecError(
            f"slug: axis {name!r} has the value {value!r}: text needs [a-z0-9_] and must not read as a number"
        )
    raise SpecError(f"slug: axis {name!r} has the value {value!r} of type {type(value).__name__}: only int and str")
