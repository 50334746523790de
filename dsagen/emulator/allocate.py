"""Which slot each register takes: liveness over the control flow, then a linear scan.

A slot is a row of 32 lanes. Lanes that have parted write only their own column, so liveness along a lane's own path is
enough, and no divergence analysis is needed. A guarded definition keeps the old value alive.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dsagen.emulator.operations import Op
from dsagen.emulator.ptx import Reg


@dataclass(frozen=True)
class Slots:
    """Slot of each register by its number; 64-bit registers take two from there on."""

    of: dict[int, int]
    end: int
    spans: dict[int, tuple[int, int]]  # first and last operation at which a register has its slot


def allocate(ops: Sequence[Op], first: int) -> Slots:
    """Slots from `first` on for every register of a kernel."""
    intervals, wide = _intervals(ops)
    singles, single_count = _scan({n: span for n, span in intervals.items() if n not in wide})
    pairs, pair_count = _scan({n: span for n, span in intervals.items() if n in wide})
    of = {number: first + place for number, place in singles.items()}
    of |= {number: first + single_count + 2 * place for number, place in pairs.items()}
    return Slots(of, first + single_count + 2 * pair_count, intervals)


def _scan(intervals: dict[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Places so that registers alive at once have different ones, and how many places there are."""
    places: dict[int, int] = {}
    active: list[tuple[int, int, int]] = []  # end, start, place
    free: list[int] = []
    count = 0
    for number, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        # A source that ends here gives its place to a result; a result that is never read keeps its own.
        while active and (active[0][0] < start or (active[0][0] == start and active[0][1] < start)):
            heapq.heappush(free, heapq.heappop(active)[2])
        if free:
            place = heapq.heappop(free)
        else:
            place, count = count, count + 1
        places[number] = place
        heapq.heappush(active, (end, start, place))
    return places, count


def _intervals(ops: Sequence[Op]) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """First and last position at which each register holds a value, and which registers are 64 bits wide."""
    starts = _block_starts(ops)
    ends = [*starts[1:], len(ops)]
    block_at = {start: block for block, start in enumerate(starts)}
    uses, defs, spans, wide = _local_sets(ops, starts, ends)
    followers = [_followers(ops[end - 1], end, block_at) for end in ends]
    live_in, live_out = _flow(uses, defs, followers)
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for number in _bits(live_in[block]):
            _widen(spans, number, start)
        for number in _bits(live_out[block]):
            _widen(spans, number, end - 1)
    return spans, wide


def _block_starts(ops: Sequence[Op]) -> list[int]:
    starts = {0}
    for at, op in enumerate(ops):
        if op.target >= 0:
            starts.add(op.imm)
        if op.target >= 0 or op.name == "exit":
            starts.add(at + 1)
    return sorted(start for start in starts if start < len(ops))


def _followers(last: Op, end: int, block_at: dict[int, int]) -> list[int]:
    out = [block_at[last.imm]] if last.target >= 0 else []
    leaves = (last.target >= 0 or last.name == "exit") and last.guard is None
    if not leaves and end in block_at:
        out.append(block_at[end])
    return out


def _local_sets(
    ops: Sequence[Op], starts: list[int], ends: list[int]
) -> tuple[list[int], list[int], dict[int, tuple[int, int]], set[int]]:
    """Per block, as bit sets: registers read before written, and written for certain."""
    uses, defs = [0] * len(starts), [0] * len(starts)
    spans: dict[int, tuple[int, int]] = {}
    wide: set[int] = set()
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        used = defined = 0
        for at in range(start, end):
            op = ops[at]
            written = 0
            for arg in op.args:
                reg = arg.what
                if not isinstance(reg, Reg) or reg.bits == 0:
                    continue
                bit = 1 << reg.number
                if reg.bits == 64:
                    wide.add(reg.number)
                _widen(spans, reg.number, at)
                if arg.role == "use" or op.guard is not None:
                    used |= bit & ~defined
                if arg.role == "def" and op.guard is None:
                    written |= bit
            defined |= written
        uses[block], defs[block] = used, defined
    return uses, defs, spans, wide


def _flow(uses: list[int], defs: list[int], followers: list[list[int]]) -> tuple[list[int], list[int]]:
    count = len(uses)
    before: list[list[int]] = [[] for _ in range(count)]
    for block, after in enumerate(followers):
        for follower in after:
            before[follower].append(block)
    live_in, live_out = list(uses), [0] * count
    work = list(range(count))
    queued = [True] * count
    while work:
        block = work.pop()
        queued[block] = False
        out = 0
        for follower in followers[block]:
            out |= live_in[follower]
        live_out[block] = out
        new = uses[block] | (out & ~defs[block])
        if new != live_in[block]:
            live_in[block] = new
            for earlier in before[block]:
                if not queued[earlier]:
                    queued[earlier] = True
                    work.append(earlier)
    return live_in, live_out


def _widen(spans: dict[int, tuple[int, int]], number: int, at: int) -> None:
    first, last = spans.get(number, (at, at))
    spans[number] = (min(first, at), max(last, at))


def _bits(value: int) -> list[int]:
    text = bin(value)[:1:-1]
    out, at = [], text.find("1")
    while at >= 0:
        out.append(at)
        at = text.find("1", at + 1)
    return out
