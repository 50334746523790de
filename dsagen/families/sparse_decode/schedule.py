"""How many splits an index row is cut into: a small explicit cost model, and the rule that is blind to the batch.

Times are microseconds of one SM. The constants come from the H200's ceilings and are not a measured table, so what is
chosen with them is reported as untuned.
"""

from __future__ import annotations

from dataclasses import dataclass

# Read rate of one SM when all of them read: 4.53 TB/s over 132 SMs.
COPY_BYTES_PER_US = 34_000.0
# Matrix rate of one SM with operands in registers, about half of what its tensor cores reach otherwise.
MMA_FLOPS_PER_US = 3.0e6
# Barriers and softmax of a tile, not hidden behind copies or matrix work.
TILE_FIXED_US = 0.3
# Query staging, the first gather's latency and the epilogue of one CTA.
PART_FIXED_US = 6.0
# Second kernel: its own start and end, after the main kernel's.
COMBINE_FIXED_US = 4.0
# Partial outputs are written and read back through L2.
COMBINE_BYTES_PER_US = 2.5e6
# Splits that a kernel may combine itself without being asked: more of them have never been faster than two launches.
JOINED_SPLITS = 2
# Their meetings and the exchange of partials through shared memory, what the first run of that code takes included.
JOIN_FIXED_US = 4.8
# Index columns of a split when the split count may depend on the row width only.
BATCH_INVARIANT_SPLIT_TOKENS = 512


@dataclass(frozen=True)
class SplitLoad:
    """What the cost model reads.

    `units` are CTAs without splitting (rows x head groups); `row_tiles` tiles cover one index row. `tile_us` is the
    time of one tile on an SM of its own, `resident_ctas` how many CTAs an SM holds, `partial_bytes` the partial output
    of all rows for one split; with `can_join` two splits combine themselves.
    """

    units: int
    row_tiles: int
    tile_us: float
    sm_count: int
    resident_ctas: int
    partial_bytes: int
    can_join: bool = False


def tile_time_us(tile_bytes: int, tile_flops: int) -> float:
    """Time of one tile: copies and matrix work overlap, the rest does not."""
    return max(tile_bytes / COPY_BYTES_PER_US, tile_flops / MMA_FLOPS_PER_US) + TILE_FIXED_US


def split_cost_us(load: SplitLoad, num_splits: int) -> float:
    """Estimated time of the op with that many splits: rounds of CTAs over the SMs, then the combine."""
    ctas = load.units * num_splits
    # CTAs that share an SM share its bandwidth and tensor cores, and overlap only their fixed parts.
    sharing = min(load.resident_ctas, -(-ctas // load.sm_count))
    rounds = -(-ctas // (load.sm_count * sharing))
    part_tiles = -(-load.row_tiles // num_splits)
    main = rounds * (PART_FIXED_US + part_tiles * load.tile_us * sharing)
    if num_splits == 1:
        return main
    if joins(load, num_splits):
        return main + JOIN_FIXED_US
    return main + COMBINE_FIXED_US + 2 * num_splits * load.partial_bytes / COMBINE_BYTES_PER_US


def joins(load: SplitLoad, num_splits: int) -> bool:
    """Whether that many splits are combined by the launch that computes them, where nobody asks otherwise."""
    return load.can_join and num_splits == JOINED_SPLITS


def choose_splits(load: SplitLoad) -> int:
    """The cheapest split count in 1 .. row_tiles; of equal ones the smallest."""
    if load.units == 0:
        return 1
    # Of all counts that give the longest split the same number of tiles, the smallest is never worse.
    candidates = sorted({-(-load.row_tiles // tiles) for tiles in range(1, load.row_tiles + 1)})
    return min(candidates, key=lambda splits: split_cost_us(load, splits))


def batch_invariant_splits(topk: int, row_tiles: int) -> int:
    """Split count from the width of the index row alone, so that a row's bits never depend on its batch or device."""
    return max(1, min(row_tiles, -(-topk // BATCH_INVARIANT_SPLIT_TOKENS)))
