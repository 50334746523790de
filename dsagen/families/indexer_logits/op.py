"""Launch arithmetic of the indexer's logits: grid, units, floor, and a text that shows them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dsagen.arch import Arch
from dsagen.families.indexer_logits.guards import LAUNCH_GUARDS, TILES_GUARD, TOKENS_GUARD, WIDTH_GUARD
from dsagen.index_format import index_format
from dsagen.plan import KernelPlan

SIZE_GUARDS = (TOKENS_GUARD, WIDTH_GUARD, TILES_GUARD)
SCORE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class LogitsShape:
    """Run-time sizes of a call: `next_n` tokens of each of `batch` requests, `width` keys at most, `heads` heads."""

    batch: int
    next_n: int
    width: int
    heads: int

    @property
    def tokens(self) -> int:
        """Rows of scores."""
        return self.batch * self.next_n


@dataclass(frozen=True)
class Partition:
    """How a call is shared: tokens that share a pass over keys, passes of a request, tiles at the most, blocks."""

    unit_tokens: int
    unit_count: int
    tiles: int
    blocks: int


def partition_of(plan: KernelPlan, shape: LogitsShape, sm_count: int) -> Partition:
    """The partition of a call. It depends on no length: blocks find their tiles on the device."""
    unit_tokens = max(1, min(shape.next_n, plan.constant("kQueryRows") // shape.heads))
    unit_count = -(-shape.next_n // unit_tokens)
    tiles = shape.batch * unit_count * -(-shape.width // plan.constant("kTileKeys"))
    return Partition(unit_tokens, unit_count, tiles, max(1, min(tiles, sm_count * plan.min_blocks_per_sm)))


def size_values(plan: KernelPlan, shape: LogitsShape, sm_count: int) -> dict[str, int]:
    """What the guards of sizes read."""
    part = partition_of(plan, shape, sm_count)
    units = shape.batch * part.unit_count
    values = {"batch": shape.batch, "next_n": shape.next_n, "width": shape.width}
    return {**values, "tiles": part.tiles, "units": units}


def floor_seconds(plan: KernelPlan, shape: LogitsShape, arch: Arch) -> float | None:
    """The larger of matrix and memory time with all keys in their windows; None for an arch without measured device.

    A key is read once a request and a score written once a token, at the read rate; products run at the bf16 rate.
    """
    figures = next(iter(arch.figures), None)
    if figures is None:
        return None
    dim = plan.constant("kDim")
    record = index_format(str(plan.variant.axis("keys")))
    keys_bytes = shape.batch * shape.width * record.record_bytes(dim)
    scores_bytes = shape.tokens * shape.width * SCORE_BYTES[str(plan.variant.axis("score"))]
    flops = 2.0 * shape.tokens * shape.width * shape.heads * dim
    memory = (keys_bytes + scores_bytes) / figures.dram_read_bytes_per_second
    return max(memory, flops / figures.bf16_flops_per_second)


def explain_call(plan: KernelPlan, shape: LogitsShape, sm_count: int, arch: Arch) -> str:
    """The partition of a call, its floor and what is checked, for people."""
    values = size_values(plan, shape, sm_count)
    lines = [
        f"shape: {shape.batch} requests of {shape.next_n} tokens, {shape.heads} heads, up to {shape.width} keys",
        f"kernel: {plan.slug}",
        "sizes:",
    ]
    for guard in SIZE_GUARDS:
        read = "  ".join(f"{name}={values[name]}" for name in guard.names)
        verdict = "holds" if guard.holds(values) else f"refuses: {guard.message.format(**values)}"
        lines.append(f"  [{guard.guard_id}] {guard.expression}  {read}  {verdict}")
    rest = [guard for guard in LAUNCH_GUARDS if guard not in SIZE_GUARDS]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in rest)]
    part = partition_of(plan, shape, sm_count)
    lines.append(f"units: {part.unit_count} a request, {part.unit_tokens} tokens share a pass over its keys")
    lines.append(f"grid: {part.blocks} CTAs share up to {part.tiles} tiles of {plan.constant('kTileKeys')} keys")
    lines.append("copies: 16 B where pages start at multiples of 16 B, else 4 B")
    seconds = floor_seconds(plan, shape, arch)
    if seconds is not None:
        lines.append(f"floor: {seconds * 1e6:.1f} us with every key in its window")
    return "\n".join(lines)
