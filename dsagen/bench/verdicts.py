"""What a comparison with other libraries comes to: a verdict for each shape, and a summary of all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsagen.bench.figures import DecodeFigures, PeerFigure, number
from dsagen.bench.shapes import Shape

# Two runs of one build differ by about that, so what is nearer is neither faster nor slower.
LEVEL_BY = 0.02

FASTER, LEVEL, SLOWER, ALONE = "faster", "level", "slower", "no peer"
HEADER = ("shape", "GPU us", "spread", "floor us", "best peer us", "time", "verdict", "best peer")


@dataclass(frozen=True)
class ComparedShape:
    """A shape of a list, and what was measured of it."""

    shape: Shape
    figures: DecodeFigures

    @property
    def best(self) -> PeerFigure | None:
        """The fastest peer that could run the shape; None where there was none."""
        timed = [peer for peer in self.figures.peers if peer.gpu_us is not None]
        return min(timed, key=lambda peer: peer.gpu_us or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """Our GPU time over the best peer's."""
        best_us = self.best.gpu_us if self.best else None
        return None if best_us is None else self.figures.gpu_us / best_us

    @property
    def verdict(self) -> str:
        """One of FASTER, LEVEL, SLOWER and ALONE."""
        if self.ratio is None:
            return ALONE
        if abs(self.ratio - 1) <= LEVEL_BY:
            return LEVEL
        return FASTER if self.ratio < 1 else SLOWER

    @property
    def change(self) -> str:
        """How much more or less time we take than the best peer, such as "-48.0%"."""
        return "-" if self.ratio is None else f"{self.ratio - 1:+.1%}"

    @property
    def text(self) -> str:
        """The verdict in words."""
        figures, best = self.figures, self.best
        beside = f", {best.label} {best.gpu_us:.1f} us ({self.change})" if best else ""
        return f"{self.verdict}: {self.shape.title}: {figures.gpu_us:.1f} us{beside}"

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        figures, best = self.figures, self.best
        return (
            self.shape.title,
            f"{figures.gpu_us:.1f}",
            f"{figures.spread:.1%}",
            number(figures.floor_us, ".1f"),
            number(best.gpu_us if best else None, ".1f"),
            self.change,
            self.verdict,
            best.label if best else "-",
        )

    def to_json(self) -> dict[str, Any]:
        """The row of the shape's figures with the verdict."""
        return {
            "corner": self.shape.corner,
            "verdict": self.verdict,
            "best_peer": self.best.label if self.best else None,
            "best_peer_us": self.best.gpu_us if self.best else None,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            **self.figures.to_json(),
        }


def counts(compared: Sequence[ComparedShape]) -> dict[str, int]:
    """How many shapes have each verdict."""
    found = Counter(one.verdict for one in compared)
    return {verdict: found[verdict] for verdict in (FASTER, LEVEL, SLOWER, ALONE)}


def summary_lines(compared: Sequence[ComparedShape]) -> list[str]:
    """All shapes in few lines: how many are faster, by how much, which are not, and what peers could not do."""
    found = counts(compared)
    lines = [
        f"of {len(compared)} shapes: {found[FASTER]} faster than the best peer, {found[LEVEL]} level (within "
        f"{LEVEL_BY:.0%}), {found[SLOWER]} slower, {found[ALONE]} that no peer ran"
    ]
    ordered = sorted((one.ratio, index) for index, one in enumerate(compared) if one.ratio is not None)
    if ordered:
        mean = statistics.geometric_mean([ratio for ratio, _ in ordered])
        least, most = compared[ordered[0][1]], compared[ordered[-1][1]]
        lines.append(f"time beside the best peer's: {mean - 1:+.1%} in the geometric mean")
        lines += [f"  least: {least.text}", f"  most: {most.text}"]
    lines += [compared[index].text for _, index in reversed(ordered) if compared[index].verdict == SLOWER]
    return [*lines, *_notes(compared)]


def _notes(compared: Sequence[ComparedShape]) -> list[str]:
    """What kept peers from running, each reason once."""
    notes = Counter((peer.name, peer.note) for one in compared for peer in one.figures.peers if peer.note)
    return [f"{name} was not timed in {count} of {len(compared)}: {note}" for (name, note), count in notes.items()]
