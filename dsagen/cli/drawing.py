"""A kernel plan as text: its axes, what it takes of a multiprocessor, shared memory and pipeline drawn, its guards."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsagen.cli.table import aligned
from dsagen.guard import Guard
from dsagen.limits import BUILD_GUARDS, CALL_RULES, LOAD_GUARDS
from dsagen.occupancy import resident_ctas, resources
from dsagen.plan import KernelPlan
from dsagen.render import leading_comment

BAR_CELLS = 32
WARP = 32
_ROLE_REGISTERS = re.compile(r"k(?!Compiled)([A-Z]\w*)Registers")


def plan_lines(plan: KernelPlan, launch_guards: Sequence[Guard], registers: int | None, why: str = "") -> list[str]:
    """The whole plan; `registers` are those of the compiled kernel, None when it is not in the store; `why` says what
    decided on its body.
    """
    sections = [
        ("body", [f"{plan.variant.body}: {why}"] if why else []),
        ("axes", [f"{name} = {value}" for name, value in plan.variant.axes]),
        ("launch", launch_lines(plan, registers)),
        ("budget", aligned(plan.budget)),
        ("of a multiprocessor", occupancy_lines(plan)),
        ("registers by role", register_lines(plan)),
        ("shared memory", smem_lines(plan)),
        ("pipeline", pipeline_lines(plan)),
        ("argument block", params_lines(plan)),
        ("guards that held when this was planned", plan_guard_lines(plan)),
        ("guards checked on the compiled kernel", guard_lines(BUILD_GUARDS)),
        ("guards checked on the loaded kernel", guard_lines(LOAD_GUARDS)),
        ("guards checked at launch", guard_lines(launch_guards)),
        ("what each call is held to besides", call_rule_lines() if launch_guards else []),
    ]
    lines = [plan.slug]
    for title, content in sections:
        if content:
            lines += ["", f"  {title}", *(f"    {line}" for line in content)]
    return lines


def launch_lines(plan: KernelPlan, registers: int | None) -> list[str]:
    """Grid, block, shared memory and registers."""
    used = "not compiled yet" if registers is None else f"{registers} used"
    exact = "exactly" if plan.moves_registers else "at most"
    overlap = ["starts before its predecessor ends (programmatic dependent launch)"] if plan.overlaps_previous else []
    return [
        f"grid of {plan.grid} blocks, {plan.threads} threads each, at least {plan.min_blocks_per_sm} a multiprocessor",
        f"{plan.smem_bytes} B of dynamic shared memory",
        f"{plan.registers_cap} registers a thread {exact}, {used}",
        *overlap,
    ]


def occupancy_lines(plan: KernelPlan) -> list[str]:
    """A bar per resource of a multiprocessor, with the blocks that it holds at once, and what bounds their number."""
    count = resident_ctas(plan)
    rows = []
    for use in resources(plan):
        taken = count * use.per_block
        amount = f"{taken} of {use.per_sm} {use.unit}".rstrip()
        rows.append([use.name, _bar(0, taken, use.per_sm), amount, f"room for {use.allows}"])
    bounds = [use.name for use in resources(plan) if use.allows <= count]
    return [*aligned(rows), f"{count} block{'s' if count > 1 else ''} at once, bounded by {' and '.join(bounds)}"]


def register_shares(plan: KernelPlan) -> list[tuple[str, int, int]]:
    """(role, warps, registers a thread) where warps hand registers to each other; none elsewhere.

    A role's constants are `k<Role>Registers` and `k<Role>Warps`; the one without a number of warps has the rest.
    """
    if not plan.moves_registers:
        return []
    constants = dict(plan.constants)
    found = [(match[1], int(constants[name])) for name in constants if (match := _ROLE_REGISTERS.fullmatch(name))]
    warps = {role: int(constants.get(f"k{role}Warps", 0)) for role, _ in found}
    rest = plan.threads // WARP - sum(warps.values())
    return [(role.lower(), warps[role] or rest, registers) for role, registers in found]


def register_lines(plan: KernelPlan) -> list[str]:
    """A bar per role of the registers that its warps have, side by side as they share a block's."""
    rows, begin, total = [], 0, plan.threads * plan.registers_cap
    for role, warps, registers in register_shares(plan):
        end = begin + warps * WARP * registers
        amount = f"{warps} warps x {WARP} x {registers} = {end - begin}"
        rows.append([role, _bar(begin, end, total), amount])
        begin = end
    return aligned(rows)


def pipeline_lines(plan: KernelPlan) -> list[str]:
    """What the body says of itself: roles over time, barriers and who waits for them."""
    return [line for alias in plan.types if alias.name == "Body" for line in leading_comment(alias.header)]


def smem_lines(plan: KernelPlan) -> list[str]:
    """One line per member, with its bytes, a bar to scale and what it is for."""
    rows = []
    for field in plan.smem:
        extents = "".join(f"[{extent}]" for extent in field.extents)
        span = f"{field.offset_bytes:>6} .. {field.last_byte:>6}"
        bar = _bar(field.offset_bytes, field.last_byte + 1, plan.smem_bytes)
        rows.append([span, f"{field.size_bytes:>6} B", bar, f"{field.ctype} {field.name}{extents}", field.note])
    return aligned(rows)


def params_lines(plan: KernelPlan) -> list[str]:
    """Offset, declaration and meaning of each argument."""
    rows = [[f"{field.offset_bytes:>4}", field.declaration, field.note] for field in plan.params]
    return [*aligned(rows), f"{plan.params_bytes} B in all"]


def plan_guard_lines(plan: KernelPlan) -> list[str]:
    """Id, expression and the values it held with."""
    return aligned(
        [
            [f"[{guard.guard_id}]", guard.expression, ", ".join(f"{name} {value}" for name, value in guard.values)]
            for guard in plan.guards
        ]
    )


def guard_lines(guards: Sequence[Guard]) -> list[str]:
    """Id and expression."""
    return aligned([[f"[{guard.guard_id}]", guard.expression] for guard in guards])


def call_rule_lines() -> list[str]:
    """Id and text of the rules that no guard says."""
    return aligned([[f"[{rule}]", text] for rule, text in CALL_RULES.items()])


def _bar(begin: int, end: int, total: int) -> str:
    """The range as cells of a row that stands for `total` bytes; never empty."""
    first = min(begin * BAR_CELLS // total, BAR_CELLS - 1)
    last = max(first + 1, -(-end * BAR_CELLS // total))
    return "|" + " " * first + "#" * (last - first) + " " * (BAR_CELLS - last) + "|"
