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
        ("removed", r"mbarrier\.(?:expect_tx|init)[^;]*;", _nothing),
        ("removed", r"cp\.async\.(?:mbarrier\.arrive|commit_group|wait_group|wait_all)[^;]*;", _nothing),
        ("removed", r"cp\.async\.bulk\.(?:commit|wait)[^;]*;", _nothing),
        (
            "without copies", r"cp\.async\.mbarrier\.arrive\.noinc(\S*)\s+([^;]*);",
            lambda m: f"mbarrier.arrive{m[1]} _, {m[2]};",
        ),
        ("with a group more", r"(cp\.async\.wait_group\s+)(\d+);", _one_group_more),
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
class Changed:
    """A text of which one instruction was changed, which began at `at`."""

    ptx: str
    change: str
    instruction: str
    at: int


def changed_texts(ptx: str) -> Iterator[Changed]:
    """Every change of a PTX text, in its order."""
    # Statements are looked for one by one: the end of one is the beginning of the next.
    at = 0
    while (match := _STATEMENT.search(ptx, at)) is not None:
        at = match.end("text") - 1
        instruction = " ".join(match["text"].split())
        for change, pattern, rewrite in _CHANGES:
            found = pattern.match(instruction)
            if found is None:
                continue
            text = rewrite(found)
            start = match.start("guard") if match["guard"] and not text else match.start("text")
            yield Changed(ptx[:start] + text + ptx[match.end("text") :], change, instruction, match.start("text"))


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Every mutant of a kernel, in the order of its text."""
    source = render(kernel.plan).text.splitlines()
    copies = Counter[tuple[str, tuple[int, ...]]]()
    for changed in changed_texts(kernel.ptx):
        lines = _calls(kernel.ptx, changed.at)
        calls, ahead = (tuple(source[line - back].strip() for line in lines) for back in (1, 2))
        number = kernel.ptx.count("\n", 0, changed.at) + 1
        copy = copies[changed.change, lines]
        copies[changed.change, lines] += 1
        mutant = replace(kernel, ptx=changed.ptx)
        yield Mutant(mutant, changed.change, changed.instruction, calls, ahead, number, copy)


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
