"""How a kernel is timed on a device.

GPU time (`graph_time_us`)
    `n` calls on `n` different input sets are captured in one CUDA graph, so that no CPU launch cost is in the figure.
    The sets together are larger than the L2 cache several times over (`input_sets_for`), so each call finds its inputs
    in DRAM, as a layer of a serving engine does. After about `warm_ms` of replays the timed replays are queued back to
    back with an event between neighbours: the device never waits for the CPU between two events. The figure is the
    median over replays, divided by `n`. A call of several kernels includes the gaps between them.

GPU time of contestants (`Contestant`, `take_turns`)
    The same, where the replays of several lists of calls alternate: whatever changes while they run, clocks and heat
    above all, reaches each of them alike. A turn begins with an untimed replay, after which code and inputs lie where a
    run of nothing else would have them.

Eager cost (`eager_cost_us`)
    Back-to-back calls without a synchronisation: the CPU time to issue one, and the wall time until all are complete,
    per call. The wall time exceeds the GPU time where the CPU is the slower side.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsagen.errors import DeviceError

# Several times the largest L2 of the devices that we measure on (60 MB on an H200).
COLD_BYTES = 256 << 20
MIN_SETS = 2
MAX_SETS = 192

MIN_REPLAYS = 9
MAX_REPLAYS = 60

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """GPU time of one call.

    `median_us` is per call, over `replays` replays of a graph of `sets` calls; `spread` is (p90 - p10) / median of the
    replays, so 0.01 means one percent.
    """

    median_us: float
    spread: float
    sets: int
    replays: int


def input_sets_for(
    bytes_per_call: int, *, total_bytes: int = COLD_BYTES, least: int = MIN_SETS, most: int = MAX_SETS
) -> int:
    """How many input sets to rotate so that together they hold `total_bytes`, within `least` .. `most`.

    `bytes_per_call` counts what one call reads and writes. Calls so small that `most` sets stay below the L2 size run
    partly warm; `Timing.sets` tells.
    """
    if bytes_per_call < 1:
        raise ValueError(f"bytes_per_call must be at least 1, got {bytes_per_call}")
    return max(least, min(most, -(-total_bytes // bytes_per_call)))


def graph_time_us(calls: Sequence[Call], *, warm_ms: float = 25.0, budget_ms: float = 60.0) -> Timing:
    """GPU time per call of `calls`, one callable for each input set, by the protocol above.

    Every callable runs once eagerly first, so whatever it sets up lazily is in place before the capture. The number of
    timed replays fills `budget_ms`, within MIN_REPLAYS .. MAX_REPLAYS. Raises DeviceError without a CUDA device, and
    whatever a callable raises, also when it does what a capture forbids (a synchronisation, a copy to the host).
    """
    contestant = Contestant(calls, warm_ms=warm_ms)
    contestant.turn(_count(budget_ms / contestant.replay_ms, MIN_REPLAYS))
    contestant.close()
    return contestant.timing


class Contestant:
    """Calls that are captured and warm, to be timed in turns.

    Raises DeviceError without a CUDA device, and whatever a callable raises, also when it does what a capture forbids.
    """

    def __init__(self, calls: Sequence[Call], *, warm_ms: float = 25.0) -> None:
        _check_calls(calls)
        # Replays use what the calls hold: plans, workspaces and lists that nobody else may have.
        self._calls = calls
        self._graph, self._sets = _capture(calls), len(calls)
        self._durations_ms: list[float] = []
        # About what one replay takes, in ms.
        self.replay_ms = max(_replay_durations_ms(self._graph, 2)[-1], 1e-3)
        for _ in range(_count(warm_ms / self.replay_ms, 1)):
            self._graph.replay()
        torch.cuda.synchronize()

    def turn(self, replays: int) -> None:
        """Time so many replays, queued behind an untimed one."""
        self._durations_ms += _replay_durations_ms(self._graph, replays)

    def close(self) -> None:
        """Give the graph and its memory back, and what the calls hold; what was timed stays."""
        self._graph.reset()
        self._calls = ()

    @property
    def timing(self) -> Timing:
        """Of all turns so far; there has to be one."""
        return summarise_replays(self._durations_ms, sets=self._sets)


def take_turns(contestants: Sequence[Contestant], *, turns: int = 5, budget_ms: float = 40.0) -> None:
    """Time contestants in `turns` rounds, each of them for `budget_ms` in all, or MIN_REPLAYS replays if that is more.

    Every second round goes backwards, so that none always follows the same other.
    """
    replays = [-(-_count(budget_ms / one.replay_ms, MIN_REPLAYS) // turns) for one in contestants]
    for turn in range(turns):
        pairs = list(zip(contestants, replays, strict=True))
        for contestant, count in pairs if turn % 2 == 0 else reversed(pairs):
            contestant.turn(count)


def summarise_replays(durations_ms: Sequence[float], *, sets: int) -> Timing:
    """The Timing of replays that took `durations_ms` each, of a graph with `sets` calls."""
    ordered = sorted(durations_ms)
    median_ms = statistics.median(ordered)
    last = len(ordered) - 1
    spread = (ordered[int(0.9 * last)] - ordered[int(0.1 * last)]) / median_ms
    return Timing(median_us=median_ms * 1e3 / sets, spread=spread, sets=sets, replays=len(ordered))


def eager_cost_us(calls: Sequence[Call], *, calls_per_round: int = 200, rounds: int = 3) -> tuple[float, float]:
    """(issue_us, wall_us) per call of eager back-to-back calls; the round with the median wall time.

    The device queues about a thousand launches, so `calls_per_round` times the kernels of a call should stay below
    that: beyond it the issue time includes waiting for the device. Raises DeviceError without a CUDA device.
    """
    _check_calls(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    measured: list[tuple[float, float]] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for index in range(calls_per_round):
            calls[index % len(calls)]()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        measured.append(((issued - start) * 1e6 / calls_per_round, (done - start) * 1e6 / calls_per_round))
    measured.sort(key=lambda pair: pair[1])
    return measured[len(measured) // 2]


def _check_calls(calls: Sequence[Call]) -> None:
    if not calls:
        raise ValueError("nothing to time: the list of calls is empty")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"timing needs a CUDA device, and torch {torch.__version__} sees none: run on a machine with a GPU, "
            "its driver and a CUDA build of torch"
        )


def _count(wanted: float, least: int) -> int:
    return max(least, min(MAX_REPLAYS, int(wanted)))


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all calls, each of which has run once on a side stream before."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The same stream as before: what a call has set up may be tied to the stream that it ran on.
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    return graph


def _replay_durations_ms(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Device time of each of `replays` replays that are queued behind an untimed one."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
    # The untimed replay keeps the device busy while the CPU queues the first timed one.
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(marks)]
