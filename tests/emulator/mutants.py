"""Kernels with one barrier, fence, wait, commit or arrival fewer, or with a weaker one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from decode import Kernel

from dsagen.render import render


@dataclass(frozen=True)
class Mutant:
    """A kernel of which one instruction was changed. `change` says how, `instruction` is the original.

    `calls` are the CUDA lines that lead to it, outermost first, `ahead` those before each of them, and `ptx_line` is
    where it stands. It is the `copy`-th of those that one CUDA line became and that are changed in the same way.
    """

    kernel: Kernel
    change: str
    instruction: str
    calls: tuple[str, ...]
    ahead: tuple[str, ...]
    ptx_line: int
    copy: int

    def __str__(self) -> str:
        where = " > ".join(self.calls) or f"PTX line {self.ptx_line}"
        return f"{self.kernel.plan.variant.slug}: {self.change} {self.instruction} at {where}"


Rewrite = Callable[[re.Match[str]], str]
_SHARED = r"\.shared(?:::cta)?"
_SPACE = r"\.shared(?:::\w+)?"


def _nothing(match: re.Match[str]) -> str:
    return ""


def _fewer_threads(match: re.Match[str]) -> str:
    return f"{{ .reg .b32 fewer; sub.u32 fewer, {match[2]}, 32; {match[1]}fewer{match[3]} }}"


def _one_group_more(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1};"


def _relaxed_arrival(match: re.Match[str]) -> str:
    return f"{match[1]}.relaxed.cta{match[2]}"


def _without_vote(match: re.Match[str]) -> str:
    return f"mov.pred {match[1]}, {match[2]};"


# What is removed or weakened, and how: a row for each way. The first group of all patterns is the whole instruction.
_CHANGES: tuple[tuple[str, re.Pattern[str], Rewrite], ...] = tuple(
    (change, re.compile(pattern + r"\Z"), rewrite)
    for change, pattern, rewrite in (
        ("removed", r"bar(?:rier)?(?:\.cta)?\.(?:sync|arrive)\b[^;]*;", _nothing),
        ("removed", r"bar(?:rier)?(?:\.cta)?\.red\.(?:and|or)\.pred\s+(\S+),.*,\s*(!?[%\w]+);", _without_vote),
        (
            "for fewer threads", r"(bar(?:rier)?(?:\.cta)?\.(?:sync|arrive)[.\w]*\s+[^,;]+,\s*)([%\w]+)(;)",
            _fewer_threads,
        ),
        ("for fewer threads", r"(bar(?:rier)?(?:\.cta)?\.red[^,]*,[^,]*,\s*)([%\w]+)(,[^;]*;)", _fewer_threads),
        ("removed", r"bar\.warp\.sync\b[^;]*;", _nothing),
        ("removed", r"mbarrier\.(?:try|test)_wait[^\s]*\s+([^,\s]+),[^;]*;", lambda m: f"setp.eq.u32 {m[1]}, 0, 0;"),
        ("relaxed", rf"(mbarrier\.(?:try|test)_wait(?:\.parity)?)({_SHARED}[^;]*;)", _relaxed_arrival),
        ("removed", r"mbarrier\.arrive[^;]*;", _nothing),
        ("relaxed", rf"(mbarrier\.arrive(?:\.expect_tx)?)({_SHARED}[^;]*;)", _relaxed_arrival),
        (
            "relaxed", rf"(mbarrier\.[\w.]+)\.(?:release|acquire)(\.(?:cta|cluster){_SPACE}[^;]*;)",
            lambda m: f"{m[1]}.relaxed{m[2]}",
        ),
        (
            "for the CTA only", rf"(mbarrier\.[\w.]+\.(?:release|acquire))\.cluster({_SPACE}[^;]*;)",
            lambda m: f"{m[1]}.cta{m[2]}",
        ),
        ("with fewer bytes", r"(mbarrier\.arrive\.expect_tx[^;]*,\s*)(\d+);", lambda m: f"{m[1]}{int(m[2]) - 16};"),
        ("removed", r"barrier\.cluster\.(?:arrive|wait)[^;]*;", _nothing),
        ("relaxed", r"(barrier\.cluster\.arrive)(?:\.release)?((?:\.aligned)?;)", lambda m: f"{m[1]}.relaxed{m[2]}"),
        ("removed", r"mbarrier\.(?:expect_tx|init)[^;]*;", _nothing),
        ("removed", r"cp\.async\.(?:mbarrier\.arrive|commit_group|wait_group|wait_all)[^;]*;", _nothing),
        ("removed", r"cp\.async\.bulk\.(?:commit|wait)[^;]*;", _nothing),
        (
            "without copies", r"cp\.async\.mbarrier\.arrive\.noinc(\S*)\s+([^;]*);",
            lambda m: f"mbarrier.arrive{m[1]} _, {m[2]};",
        ),
        ("with a group more", r"(cp\.async\.(?:bulk\.)?wait_group(?:\.read)?\s+)(\d+);", _one_group_more),
        ("for the source only", r"cp\.async\.bulk\.wait_group\s+(\d+);",
         lambda m: f"cp.async.bulk.wait_group.read {m[1]};"),
        ("removed", r"(?:fence|membar)\.[^;]*;", _nothing),
        ("for the CTA only", r"membar\.(?:gl|sys);", lambda m: "membar.cta;"),
        ("for the CTA only", r"(fence\.(?:sc|acq_rel))\.(?:cluster|gpu|sys);", lambda m: f"{m[1]}.cta;"),
        (
            "relaxed", r"((?:atom|red|ld|st)\.(?:\w+\.)?)(?:acquire|release|acq_rel)\b([^;]*;)",
            lambda m: f"{m[1]}relaxed{m[2]}",
        ),
        ("removed", r"griddepcontrol\.wait;", _nothing),
        ("removed", r"wgmma\.(?:fence|commit_group|wait_group)[^;]*;", _nothing),
        ("with a group more", r"(wgmma\.wait_group\.sync\.aligned\s+)(\d+);", _one_group_more),
    )
)  # fmt: skip
_STATEMENT = re.compile(
    r"(?:^|[;{}:])\s*(?P<guard>@!?[%\w]+\s+)?"
    r"(?P<text>(?:bar|mbarrier|cp\.async|fence|membar|atom|red|ld|st|griddepcontrol|wgmma)[\w.:]*[^;{}]*(?:\{[^}]*\}[^;]*)?;)",
    re.MULTILINE,
)
_LOC = re.compile(r"^\s*\.loc\s+\d+ (\d+) (\d+)(?:.*inlined_at \d+ (\d+) (\d+))?", re.MULTILINE)


@dataclass(frozen=True)
class _Site:
    """A statement of a PTX text that can be changed, from its guard on, and what it becomes by each change."""

    guard: str
    start: int
    text_start: int
    end: int
    instruction: str
    changed: tuple[tuple[str, str], ...]


def _sites(ptx: str) -> Iterator[_Site]:
    # Statements are looked for one by one: the end of one is the beginning of the next.
    at = 0
    while (match := _STATEMENT.search(ptx, at)) is not None:
        at = match.end("text") - 1
        instruction = " ".join(match["text"].split())
        changed = tuple(
            (change, rewrite(found))
            for change, pattern, rewrite in _CHANGES
            if (found := pattern.match(instruction)) is not None
        )
        if changed:
            guard = (match["guard"] or "").strip()
            start = match.start("guard") if guard else match.start("text")
            yield _Site(guard, start, match.start("text"), match.end("text"), instruction, changed)


@dataclass(frozen=True)
class Changed:
    """A text of which one instruction was changed, which began at `at`."""

    ptx: str
    change: str
    instruction: str
    at: int


def changed_texts(ptx: str) -> Iterator[Changed]:
    """Every change of a PTX text, in its order."""
    for site in _sites(ptx):
        for change, text in site.changed:
            yield Changed(_changed(ptx, site, text), change, site.instruction, site.text_start)


def _changed(ptx: str, site: _Site, text: str) -> str:
    """The text with another statement at the site; a guard goes with a statement that goes."""
    return ptx[: site.text_start if text else site.start] + text + ptx[site.end :]


def mutants(kernel: Kernel) -> list[Mutant]:
    """Every mutant of a kernel, in the order of its text.

    They share one text, in which an argument more says which of them it is, 0 none: to read a text takes longer than
    to run it. What orders warpgroup products is looked at before anything runs, on every way through the text, so
    those mutants have texts of their own.
    """
    source = render(kernel.plan).text.splitlines()
    copies = Counter[tuple[str, tuple[int, ...]]]()
    found: list[Mutant] = []
    pieces, at = [], 0
    for site in _sites(kernel.ptx):
        lines = _calls(kernel.ptx, site.start)
        calls, ahead = (tuple(source[line - back].strip() for line in lines) for back in (1, 2))
        number = kernel.ptx.count("\n", 0, site.start) + 1
        alone = site.instruction.startswith("wgmma.")
        if not alone:
            pieces += [kernel.ptx[at : site.start], _choice(site, len(found) + 1)]
            at = site.end
        for change, text in site.changed:
            changed = replace(kernel, ptx=_changed(kernel.ptx, site, text)) if alone else kernel
            found.append(Mutant(changed, change, site.instruction, calls, ahead, number, copies[change, lines]))
            copies[change, lines] += 1
    shared = _with_argument("".join(pieces) + kernel.ptx[at:])
    return [
        replace(mutant, kernel=replace(kernel, ptx=shared, choice=n + 1)) if mutant.kernel is kernel else mutant
        for n, mutant in enumerate(found)
    ]


def _choice(site: _Site, first: int) -> str:
    """The statement, or what it becomes where the argument is `first`, or the number after it, .."""
    negated = site.guard[:1] + ("!" if site.guard[1:2] != "!" else "") + site.guard[1:].lstrip("!")
    guard = f"{negated} bra unchanged; " if site.guard else ""
    out = "{ "
    for n, (_, text) in enumerate(site.changed, start=first):
        out += f"setp.ne.u32 mutant_kept, mutant, {n}; @mutant_kept bra not_{n}; {text} bra done; not_{n}: "
    # A statement whose guard is off does nothing, whatever it has become.
    return f"{{ {guard}{out}{site.instruction} done: }} unchanged: }}"


_ENTRY = re.compile(r"\.entry\s+\w+\s*\([^)]*(?P<end>\))[^{]*\{")


def _with_argument(ptx: str) -> str:
    """The text with an argument behind the kernel's others, which register `mutant` holds."""
    (entry,) = _ENTRY.finditer(ptx)
    declared = ".reg .b32 mutant; .reg .pred mutant_kept; ld.param.u32 mutant, [mutant_argument];"
    more = ",\n\t.param .u32 mutant_argument"
    return ptx[: entry.start("end")] + more + ptx[entry.start("end") : entry.end()] + declared + ptx[entry.end() :]


def _calls(ptx: str, at: int) -> tuple[int, ...]:
    """The lines of the source that led to the instruction: that of the last .loc, and each that it was inlined at."""
    places: list[tuple[str, ...]] = _LOC.findall(ptx, 0, at)
    lines: list[int] = []
    wanted = places[-1][:2] if places else None
    for line, column, from_line, from_column in reversed(places):
        if (line, column) != wanted:
            continue
        lines.append(int(line))
        wanted = (from_line, from_column)
        if not from_line:
            break
    return tuple(reversed(lines))
