"""Launch arithmetic of the indexer's logits: grid, units, floor, and a text that shows them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsagen.arch import Arch, DeviceFigures
from dsagen.families.indexer_logits.forms import CANDIDATES, COUNTED, RAGGED
from dsagen.families.indexer_logits.guards import (
    CANDIDATES_ONLY,
    COUNTED_ONLY,
    KEY_COUNT_GUARD,
    LAUNCH_GUARDS,
    NOT_OF_CANDIDATES,
    RAGGED_ONLY,
    RAGGED_TILES_GUARD,
    RAGGED_TOKENS_GUARD,
    SHARED_GUARDS,
    TILES_GUARD,
    TOKENS_GUARD,
    WIDTH_GUARD,
)
from dsagen.families.indexer_logits.hopper import BODY as HOPPER
from dsagen.families.indexer_logits.hopper import WARP_KEYS, sums_e4m3
from dsagen.guard import Guard
from dsagen.index_format import index_format
from dsagen.plan import KernelPlan
from dsagen.quantity import quantity

SIZE_GUARDS = (TOKENS_GUARD, WIDTH_GUARD, TILES_GUARD)
RAGGED_SIZE_GUARDS = (RAGGED_TOKENS_GUARD, KEY_COUNT_GUARD, RAGGED_TILES_GUARD)
# Keys of a block whose scores BLOCKS gives.
BLOCK_KEYS = 8
# Keys of a candidate block.
BLOCK_SIZES = (8, 16)
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
class RaggedShape:
    """Run-time sizes of a call over keys in one piece: `tokens` that see windows of `keys` keys, `heads` heads."""

    tokens: int
    keys: int
    heads: int


@dataclass(frozen=True)
class Partition:
    """How a call is shared: tokens that share a pass over keys, passes of a request, tiles at the most, blocks."""

    unit_tokens: int
    unit_count: int
    tiles: int
    blocks: int


def partition_of(plan: KernelPlan, shape: LogitsShape, sm_count: int) -> Partition:
    """The partition of a call. It depends on no length: blocks find their tiles on the device.

    A list of candidate blocks is one token's, so there tokens share no pass.
    """
    rows = plan.constant("kQueryRows") // shape.heads
    shared = 1 if plan.variant.kernel == CANDIDATES else int(dict(plan.constants).get("kMostTokens", rows))
    unit_tokens = max(1, min(shape.next_n, shared))
    unit_count = -(-shape.next_n // unit_tokens)
    tiles, most_tiles = (shape.batch * unit_count * -(-shape.width // size) for size in tile_sizes(plan))
    return Partition(unit_tokens, unit_count, tiles, max(1, min(most_tiles, sm_count * plan.min_blocks_per_sm)))


def most_counted(plan: KernelPlan) -> int:
    """Tokens of a request that have room for counts of their scores, of a plan of the role `COUNTED`."""
    return plan.constant("kMostTokens")


def tile_sizes(plan: KernelPlan) -> tuple[int, int]:
    """Keys of a tile, and of one of a call that has so few keys that the device makes smaller ones."""
    keys = plan.constant("kTileKeys")
    return keys, int(dict(plan.constants).get("kLeastTileKeys", keys))


def ragged_partition(plan: KernelPlan, shape: RaggedShape, sm_count: int) -> Partition:
    """The partition of a call over keys in one piece: `unit_count` are the passes of all. It depends on no window."""
    unit_tokens = max(1, min(shape.tokens, plan.constant("kQueryRows") // shape.heads))
    unit_count = -(-shape.tokens // unit_tokens)
    tiles = unit_count * -(-shape.keys // plan.constant("kTileKeys"))
    return Partition(unit_tokens, unit_count, tiles, max(1, min(tiles, sm_count * plan.min_blocks_per_sm)))


def ragged_values(plan: KernelPlan, shape: RaggedShape, sm_count: int) -> dict[str, int]:
    """What the guards of sizes read of a call over keys in one piece."""
    part = ragged_partition(plan, shape, sm_count)
    return {"tokens": shape.tokens, "keys": shape.keys, "tiles": part.tiles, "units": part.unit_count}


def size_values(plan: KernelPlan, shape: LogitsShape, sm_count: int) -> dict[str, int]:
    """What the guards of sizes read."""
    part = partition_of(plan, shape, sm_count)
    units = shape.batch * part.unit_count
    values = {"batch": shape.batch, "next_n": shape.next_n, "width": shape.width}
    return {**values, "tiles": part.tiles, "units": units}


def floor_seconds(plan: KernelPlan, shape: LogitsShape, arch: Arch) -> float | None:
    """The larger of matrix and memory time with all keys in their windows; None for an arch without measured device.

    A key is read once a request, of candidate blocks once a token, and a score written once a token, at the read rate;
    products run at the bf16 rate, and those of e4m3 operands at twice that.
    """
    figures = next(iter(arch.figures), None)
    if figures is None:
        return None
    dim = plan.constant("kDim")
    record = index_format(str(plan.variant.axis("keys")))
    reads = shape.tokens if plan.variant.kernel == CANDIDATES else shape.batch
    keys_bytes = reads * shape.width * record.record_bytes(dim)
    scores_bytes = shape.tokens * shape.width * SCORE_BYTES[str(plan.variant.axis("score"))]
    flops = 2.0 * shape.tokens * shape.width * shape.heads * dim
    memory = (keys_bytes + scores_bytes) / figures.dram_read_bytes_per_second
    return max(memory, flops / product_rate(plan, figures))


def product_rate(plan: KernelPlan, figures: DeviceFigures) -> float:
    """FLOP/s of the plan's products on a device: of e4m3 operands, or of 16-bit ones."""
    return figures.e4m3_flops_per_second if sums_e4m3(plan) else figures.bf16_flops_per_second


def explain_call(plan: KernelPlan, shape: LogitsShape, sm_count: int, arch: Arch) -> str:
    """The partition of a call, its floor and what is checked, for people.

    Of candidate blocks `shape.width` are the columns of scores: slots times keys of a block.
    """
    listed = plan.variant.kernel == CANDIDATES
    keys = quantity(shape.width, "key")
    keys = f"{keys} in candidate blocks" if listed else f"up to {keys}"
    counts = plan.variant.kernel == COUNTED
    not_of_form = RAGGED_ONLY | (NOT_OF_CANDIDATES if listed else CANDIDATES_ONLY)
    not_of_form |= frozenset() if counts else COUNTED_ONLY
    sizes = [guard for guard in SIZE_GUARDS if guard.guard_id not in not_of_form]
    lines = [
        f"shape: {quantity(shape.batch, 'request')} of {quantity(shape.next_n, 'token')}, {shape.heads} heads, {keys}",
        f"kernel: {plan.slug}",
        *_judged(sizes, size_values(plan, shape, sm_count)),
    ]
    rest = [guard for guard in LAUNCH_GUARDS if guard not in SIZE_GUARDS and guard.guard_id not in not_of_form]
    lines += ["checked on the arguments of each call:", *(f"  [{g.guard_id}] {g.expression}" for g in rest)]
    part = partition_of(plan, shape, sm_count)
    several = f"{part.unit_tokens} tokens share a pass over its keys"
    shared = several if part.unit_tokens > 1 else "each token takes a pass over its keys"
    lines.append(f"units: {part.unit_count} a request, {shared}")
    tile_keys, least = tile_sizes(plan)
    smaller = f", smaller ones down to {least} where there are few" if least < tile_keys else ""
    lines.append(f"grid: {part.blocks} CTAs share up to {part.tiles} tiles of {tile_keys} keys{smaller}")
    wide = f"bulk, one a page of a warp's {WARP_KEYS} keys," if plan.variant.body == HOPPER else "16 B"
    lines.append(f"copies: {wide} where pages start at multiples of 16 B, else 4 B")
    if counts:
        lines.append(
            f"counts: scores of up to {quantity(most_counted(plan), 'token')} of a request, by the first digit of top-k"
        )
    seconds = floor_seconds(plan, shape, arch)
    if seconds is not None:
        lines.append(f"floor: {seconds * 1e6:.1f} us with every key in its window")
    return "\n".join(lines)


def explain_forms(
    plans: Iterable[KernelPlan], shape: LogitsShape, sm_count: int, arch: Arch, reasons: Mapping[str, str]
) -> str:
    """What calls of each of these kernels take, whose tokens see up to `shape.width` keys.

    `reasons` says why a kernel has its body, by slug.
    """
    ragged, texts = RaggedShape(shape.tokens, shape.width, shape.heads), []
    for plan in plans:
        if plan.variant.kernel == RAGGED:
            texts.append(explain_ragged_call(plan, ragged, sm_count, arch))
        else:
            texts.append(explain_call(plan, shape, sm_count, arch))
        texts.append(f"body: {plan.variant.body}: {reasons[plan.slug]}")
    return "\n".join(texts)


def explain_ragged_call(plan: KernelPlan, shape: RaggedShape, sm_count: int, arch: Arch) -> str:
    """As `explain_call`, of a call over keys in one piece in which every token sees all of them."""
    part = ragged_partition(plan, shape, sm_count)
    rest = [guard for guard in LAUNCH_GUARDS if guard.guard_id in RAGGED_ONLY | SHARED_GUARDS]
    several = f"{part.unit_tokens} neighbouring tokens share a pass over their keys"
    shared = several if part.unit_tokens > 1 else "each token takes a pass over its keys"
    lines = [
        f"shape: {quantity(shape.tokens, 'token')}, {shape.heads} heads, windows of {quantity(shape.keys, 'key')}",
        f"kernel: {plan.slug}",
        *_judged(RAGGED_SIZE_GUARDS, ragged_values(plan, shape, sm_count)),
        "checked on the arguments of each call:",
        *(f"  [{g.guard_id}] {g.expression}" for g in rest if g not in RAGGED_SIZE_GUARDS),
        f"units: {part.unit_count}, {shared}",
        f"grid: {part.blocks} CTAs share up to {part.tiles} tiles of {plan.constant('kTileKeys')} keys",
        "copies: 16 B where keys start at multiples of 16 B, else 4 B",
    ]
    seconds = ragged_floor_seconds(plan, shape, arch)
    if seconds is not None:
        lines.append(f"floor: {seconds * 1e6:.1f} us with every key in every window")
    return "\n".join(lines)


def ragged_floor_seconds(plan: KernelPlan, shape: RaggedShape, arch: Arch) -> float | None:
    """As `floor_seconds`, of a call in which every token sees all keys: they are read once, each score written once."""
    figures = next(iter(arch.figures), None)
    if figures is None:
        return None
    dim, record = plan.constant("kDim"), index_format(str(plan.variant.axis("keys")))
    scores_bytes = shape.tokens * shape.keys * SCORE_BYTES[str(plan.variant.axis("score"))]
    memory = (shape.keys * record.record_bytes(dim) + scores_bytes) / figures.dram_read_bytes_per_second
    flops = 2.0 * shape.tokens * shape.keys * shape.heads * dim
    return max(memory, flops / product_rate(plan, figures))


def _judged(guards: Iterable[Guard], values: Mapping[str, int]) -> list[str]:
    lines = ["sizes:"]
    for guard in guards:
        read = "  ".join(f"{name}={values[name]}" for name in guard.names)
        verdict = "holds" if guard.holds(values) else f"refuses: {guard.message.format(**values)}"
        lines.append(f"  [{guard.guard_id}] {guard.expression}  {read}  {verdict}")
    return lines
