"""Registers of wgmma between its fence and its wait, along every path of a kernel.

Values are there at once when the machine runs a product, so that running it shows none of this. PTX leaves undefined
what happens to a kernel that reads or writes an accumulator, or writes a register of A, before a wgmma.wait_group has
waited for the product's group, or that touches one of them after the last wgmma.fence ahead of the product. A copy of a
register says the same of the copy: compilers put those between products. A constant that is moved into an accumulator
behind the fence is let through, and so is reading a register of A: it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsagen.emulator.allocate import block_starts, followers
from dsagen.emulator.operations import Op
from dsagen.emulator.syntax import Reg
from dsagen.emulator.wgmma import results_of

# Groups that are told apart by how many were committed since.
_AGES = 9
_PRODUCT, _COPY = "wgmma_", "mov_b32"


@dataclass(frozen=True)
class _State:
    """Sets of registers as bits. By age, 0 for a group that is open: accumulators and registers of A in flight; what
    has been written and read since the last fence. `unfenced`: there may have been none.
    """

    results: tuple[int, ...] = (0,) * _AGES
    sources: tuple[int, ...] = (0,) * _AGES
    written: int = 0
    read: int = 0
    unfenced: bool = False

    def merged(self, other: _State) -> _State:
        return _State(
            tuple(a | b for a, b in zip(self.results, other.results, strict=True)),
            tuple(a | b for a, b in zip(self.sources, other.sources, strict=True)),
            self.written | other.written,
            self.read | other.read,
            self.unfenced or other.unfenced,
        )


@dataclass(frozen=True)
class _Step:
    """An operation that matters: the registers that it uses and defines; of a product, accumulators and those of A."""

    at: int
    op: Op
    uses: int
    defs: int


def refuse_misuse(ops: list[Op]) -> None:
    """Replace each operation that touches registers of a product too early by one that says so when it is reached."""
    bits = _registers(ops)
    if not bits:
        return
    names = {bit: reg.name for op in ops for reg in _regs(op) if (bit := bits.get(reg.number)) is not None}
    starts = block_starts(ops)
    ends = [*starts[1:], len(ops)]
    block_at = {start: block for block, start in enumerate(starts)}
    blocks = [list(_steps(ops, start, end, bits)) for start, end in zip(starts, ends, strict=True)]
    after = [followers(ops[end - 1], end, block_at) for end in ends]
    states: list[_State | None] = [None] * len(blocks)
    states[0] = _State(unfenced=True)
    work = [0]
    while work:
        block = work.pop()
        state = states[block]
        assert state is not None
        for step in blocks[block]:
            state = _after(state, step)
        for follower in after[block]:
            known = states[follower]
            new = state if known is None else known.merged(state)
            if new != known:
                states[follower] = new
                work.append(follower)
    for steps, state in zip(blocks, states, strict=True):
        for step in steps if state is not None else ():
            assert state is not None
            problem = _problem(state, step, names)
            if problem:
                ops[step.at] = replace(step.op, name="misuse", args=[], text=problem, jumps=step.op.jumps)
            state = _after(state, step)


def _registers(ops: Sequence[Op]) -> dict[int, int]:
    """Bits of the registers that products have, and of those that are copied from or to these."""
    numbers: set[int] = set()
    for op in ops:
        if op.name.startswith(_PRODUCT):
            numbers.update(reg.number for reg in (*_accumulators(op), *_sources(op)))
    copies = [(a.number, b.number) for op in ops if op.name == _COPY and len(_regs(op)) == 2 for a, b in [_regs(op)]]
    before = -1
    while numbers and len(numbers) != before:
        before = len(numbers)
        for a, b in copies:
            if a in numbers or b in numbers:
                numbers |= {a, b}
    return {number: 1 << n for n, number in enumerate(sorted(numbers))}


def _regs(op: Op) -> list[Reg]:
    return [arg.what for arg in op.args if isinstance(arg.what, Reg) and arg.what.bits != 0]


def _accumulators(op: Op) -> list[Reg]:
    return [arg.what for arg in op.args[: results_of(op)] if isinstance(arg.what, Reg)]


def _sources(op: Op) -> list[Reg]:
    """Registers of A; descriptors are none."""
    return [reg for arg in op.args[results_of(op) :] if isinstance(reg := arg.what, Reg) and reg.bits == 32]


def _steps(ops: Sequence[Op], start: int, end: int, bits: dict[int, int]) -> Iterator[_Step]:
    for at in range(start, end):
        op = ops[at]
        uses = defs = 0
        if op.name.startswith(_PRODUCT):
            for reg in _accumulators(op):
                defs |= bits[reg.number]
            for reg in _sources(op):
                uses |= bits[reg.number]
        else:
            for arg in op.args:
                if not isinstance(arg.what, Reg) or arg.what.number not in bits:
                    continue
                if arg.role == "use":
                    uses |= bits[arg.what.number]
                elif arg.role == "def":
                    defs |= bits[arg.what.number]
        if uses or defs or op.name.startswith("warpgroup_"):
            yield _Step(at, op, uses, defs)


def _after(state: _State, step: _Step) -> _State:
    op = step.op
    if op.name == "warpgroup_fence":
        return state if op.guard is not None else replace(state, written=0, read=0, unfenced=False)
    if op.name == "warpgroup_commit":
        return replace(state, results=_older(state.results), sources=_older(state.sources))
    if op.name == "warpgroup_wait":
        return state if op.guard is not None else _waited(state, op.imm)
    if op.name.startswith(_PRODUCT):
        results = (state.results[0] | step.defs, *(bits & ~step.defs for bits in state.results[1:]))
        return replace(state, results=results, sources=(state.sources[0] | step.uses, *state.sources[1:]))
    if op.name == _COPY and step.defs:
        return _copied(state, step)
    kept = ~step.defs if op.guard is None else -1
    return replace(
        state,
        results=tuple(bits & kept for bits in state.results),
        written=state.written | step.defs,
        read=state.read | step.uses,
    )


def _older(ages: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *ages[:-2], ages[-2] | ages[-1])


def _waited(state: _State, left: int) -> _State:
    def keep(ages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(bits if age <= left else 0 for age, bits in enumerate(ages))

    return replace(state, results=keep(state.results), sources=keep(state.sources))


def _copied(state: _State, step: _Step) -> _State:
    kept = ~step.defs if step.op.guard is None else -1

    def copy(bits: int) -> int:
        return bits & kept | (step.defs if bits & step.uses else 0)

    return replace(state, results=tuple(map(copy, state.results)), written=copy(state.written), read=copy(state.read))


def _problem(state: _State, step: _Step, names: dict[int, str]) -> str:
    def name(bits: int) -> str:
        return names[bits & -bits]

    op = step.op
    results = _union(state.results)
    sources = _union(state.sources)
    wait = "of a product that no wgmma.wait_group has waited for"
    if overwritten := step.defs & sources:
        return f"wgmma: {name(overwritten)} is written, a register of A {wait}"
    if op.name.startswith(_PRODUCT):
        if state.unfenced:
            return "wgmma: a product with no wgmma.fence ahead of it"
        if early := step.uses & results:
            return f"wgmma: {name(early)} is read as a register of A, an accumulator {wait}"
        if touched := step.defs & (state.written | state.read) | step.uses & state.written:
            return f"wgmma: {name(touched)} of the product was accessed after the last wgmma.fence ahead of it"
        return ""
    if op.name == _COPY and step.uses:
        return ""
    if early := (step.uses | step.defs) & results:
        return f"wgmma: {name(early)} is accessed, an accumulator {wait}"
    return ""


def _union(ages: tuple[int, ...]) -> int:
    out = 0
    for bits in ages:
        out |= bits
    return out
