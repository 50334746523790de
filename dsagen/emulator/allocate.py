"""Which slot each register takes: liveness over the control flow, then a linear scan.

A slot is a row of 32 lanes. Lanes that have parted write only their own column, so liveness along a lane's own path is
enough, and no divergence analysis is needed. A guarded definition keeps the old value alive.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsagen.emulator.operations import Op
from dsagen.emulator.syntax import Reg


@dataclass(frozen=True)
class Slots:
    """Slot of each register by its number; wider registers take two or four from there on."""

    of: dict[int, int]
    end: int
    spans: dict[int, tuple[int, int]]  # first and last operation at which a register has its slot


def allocate(ops: Sequence[Op], first: int) -> Slots:
    """Slots from `first` on for every register of a kernel."""
    intervals, widths = _intervals(ops)
    of: dict[int, int] = {}
    for slots in (1, 2, 4):
        places, many = _scan({number: span for number, span in intervals.items() if widths[number] == slots})
        of |= {number: first + slots * place for number, place in places.items()}
        first += slots * many
    return Slots(of, first, intervals)


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


def _intervals(ops: Sequence[Op]) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """First and last position at which each register holds a value, and how many slots each takes."""
    starts = block_starts(ops)
    ends = [*starts[1:], len(ops)]
    block_at = {start: block for block, start in enumerate(starts)}
    local = _local_sets(ops, starts, ends)
    spans = local.spans
    after = [followers(ops[end - 1], end, block_at) for end in ends]
    live_in, live_out = _flow(local.uses, local.defs, after)
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for bit in _bits(live_in[block]):
            _widen(spans, local.numbers[bit], start)
        for bit in _bits(live_out[block]):
            _widen(spans, local.numbers[bit], end - 1)
    return spans, local.slots


def block_starts(ops: Sequence[Op]) -> list[int]:
    """Where the basic blocks begin, in order."""
    starts = {0}
    for at, op in enumerate(ops):
        starts.update(op.jumps)
        if op.parts:
            starts.add(at + 1)
    return sorted(start for start in starts if start < len(ops))


def followers(last: Op, end: int, block_at: dict[int, int]) -> list[int]:
    """Blocks that may come behind one that ends with this operation, ahead of `end`; `block_at` has their starts."""
    out = [block_at[to] for to in last.jumps]
    if not (last.parts and last.guard is None) and end in block_at:
        out.append(block_at[end])
    return out


@dataclass
class _Local:
    """Per block, as bit sets: registers read before written, and written for certain. Bit n stands for `numbers[n]`."""

    uses: list[int]
    defs: list[int]
    numbers: list[int] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)


def _local_sets(ops: Sequence[Op], starts: list[int], ends: list[int]) -> _Local:
    local = _Local([0] * len(starts), [0] * len(starts))
    bits: dict[int, int] = {}
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        used = defined = 0
        for at in range(start, end):
            op = ops[at]
            written = 0
            for arg in op.args:
                reg = arg.what
                if not isinstance(reg, Reg) or reg.bits == 0:
                    continue
                bit = 1 << bits.setdefault(reg.number, len(bits))
                local.slots[reg.number] = reg.slots
                _widen(local.spans, reg.number, at)
                if arg.role == "use" or op.guard is not None:
                    used |= bit & ~defined
                if arg.role == "def" and op.guard is None:
                    written |= bit
            defined |= written
        local.uses[block], local.defs[block] = used, defined
    local.numbers = list(bits)
    return local


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
