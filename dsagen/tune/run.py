"""Tuning: every choice of each shape measured in turn, and the rows of a table that come of it."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsagen.bench.data import DecodeCase
from dsagen.errors import CheckFailed, GuardError
from dsagen.families.sparse_decode.choice_table import Alternative, ChoiceRow
from dsagen.plan import KernelPlan
from dsagen.tune.shapes import Choice, choices, shape_of

# Of choices that differ by less the one that was tried first is taken: replays of one build differ by as much.
NOISE = 0.01

Progress = Callable[[str], None]


class Measurer(Protocol):
    """What tuning needs of a device."""

    plans: Sequence[KernelPlan]
    sm_count: int

    def columns(self, slug: str) -> Mapping[str, str]:
        """What a row says of a kernel and the machine beside its choice."""

    def begin(self, case: DecodeCase) -> None:
        """Draw the inputs of a case."""

    def measure(self, slug: str, num_splits: int, launches: int) -> float:
        """Microseconds of a choice; CheckFailed where its outputs are wrong, GuardError where it cannot be launched."""


@dataclass
class Deadline:
    """A time limit that knows how long a step takes: none is begun that may not end in time."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    longest_s: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def passed(self) -> bool:
        """Whether another step as long as the longest may not end in time."""
        return self.clock() - self.started + self.longest_s > self.limit_s

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, whose time is learnt."""
        begun = self.clock()
        yield
        self.longest_s = max(self.longest_s, self.clock() - begun)


@dataclass
class Tuning:
    """What came of a spec: rows, choices whose outputs were wrong, and cases that there was no time for."""

    rows: list[ChoiceRow] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[DecodeCase] = field(default_factory=list)


def tune(measurer: Measurer, cases: Sequence[DecodeCase], deadline: Deadline, progress: Progress) -> Tuning:
    """Measure the choices of each case, in their order, until the time is over.

    A case of which nothing was compared has no row. A choice that is wrong is never taken, nor is one that the device
    has no room for, as for clusters where others have most of it.
    """
    found = Tuning()
    measured: dict[DecodeCase, dict[Choice, float]] = {}
    for number, case in enumerate(cases):
        if deadline.passed:
            found.left = list(cases[number:])
            break
        times = _measure_case(measurer, case, deadline, found.wrong, progress)
        if times is None:
            found.left = list(cases[number:])
            break
        measured[case] = times
        progress(_told(case, times))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    before: DecodeCase | None = None
    for case, times in measured.items():
        if times:
            first = _first_tokens(case, before)
            found.rows.append(_row(measurer, case, times, first, date))
            before = case
    return found


def _measure_case(
    measurer: Measurer, case: DecodeCase, deadline: Deadline, wrong: list[str], progress: Progress
) -> dict[Choice, float] | None:
    """Times of a case's choices; None when time ran out before two were measured."""
    with deadline.step():
        measurer.begin(case)
    tried = choices(shape_of(case), measurer.plans, measurer.sm_count)
    times: dict[Choice, float] = {}
    for choice in tried:
        if deadline.passed:
            return times if len(times) > 1 else None
        with deadline.step():
            try:
                times[choice] = measurer.measure(choice.slug, choice.num_splits, choice.launches)
            except CheckFailed as error:
                wrong.append(str(error))
            except GuardError as error:
                progress(f"left out: {choice.slug}, {choice.num_splits} splits: {error}")
    return times


def fastest(times: Mapping[Choice, float]) -> Choice:
    """The first choice, as they were tried, that is not slower than the fastest by more than noise."""
    least = min(times.values())
    return next(choice for choice, us in times.items() if us <= least * (1 + NOISE))


def _row(
    measurer: Measurer, case: DecodeCase, times: Mapping[Choice, float], first_tokens: int, date: str
) -> ChoiceRow:
    chosen, extra = fastest(times), case.extra_topk or 0
    # Of each other kernel and number of launches the fastest, so that a table says by how much it won.
    rivals: dict[tuple[str, int], tuple[float, Choice]] = {}
    for choice, us in times.items():
        key = (choice.slug, choice.launches)
        if key != (chosen.slug, chosen.launches) and (key not in rivals or us < rivals[key][0]):
            rivals[key] = us, choice
    beside = tuple(Alternative(c.slug, c.num_splits, c.launches, round(us, 3)) for us, c in rivals.values())
    return ChoiceRow(
        kernel=chosen.slug,
        **measurer.columns(chosen.slug),
        date=date,
        heads=case.heads,
        tokens=(first_tokens, case.queries),
        topk=(case.topk, case.topk),
        extra_topk=(extra, extra),
        num_splits=chosen.num_splits,
        launches=chosen.launches,
        gpu_us=round(times[chosen], 3),
        beside=beside,
    )


def _first_tokens(case: DecodeCase, before: DecodeCase | None) -> int:
    """From where on a case speaks for fewer query tokens too: behind half as many, and behind the last smaller case of
    the same columns.
    """
    same = before is not None and (before.topk, before.extra_topk) == (case.topk, case.extra_topk)
    return max(case.queries // 2, before.queries if same and before is not None else 0) + 1


def _told(case: DecodeCase, times: Mapping[Choice, float]) -> str:
    name = f"batch {case.batch}, s_q {case.s_q}, heads {case.heads}, topk {case.width}"
    if not times:
        return f"{name}: no choice gave right outputs"
    chosen = fastest(times)
    first, us = next(iter(times)), next(iter(times.values()))
    launches = "one launch" if chosen.launches == 1 else "two launches"
    beside = "" if chosen == first else f"; untuned {us:.2f} us ({first.slug}, {first.num_splits} splits)"
    return f"{name}: {times[chosen]:.2f} us ({chosen.slug}, {chosen.num_splits} splits, {launches}){beside}"
