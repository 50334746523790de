"""Launch arithmetic of sparse decode: head groups, splits, grids, workspace layout. No torch.

CTA `i` of the main kernel handles item ((row x num_splits) + split) x head_groups + group, with row = b x s_q + s.
Split `j` of S takes tiles j, j + S, j + 2S, ... of its index row, so that a padded tail spreads over all splits; the
tiles of the second cache's index row follow those of the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dsagen.families.sparse_decode import hopper
from dsagen.families.sparse_decode.geometry import deal_heads
from dsagen.families.sparse_decode.guards import SIZE_GUARD
from dsagen.families.sparse_decode.schedule import (
    BATCH_INVARIANT_SPLIT_TOKENS,
    SplitLoad,
    batch_invariant_splits,
    choose_splits,
    joins,
    tile_time_us,
)
from dsagen.guard import check, require_int
from dsagen.kv_format import kv_format
from dsagen.occupancy import resident_ctas
from dsagen.plan import KernelPlan, round_up

Determinism = Literal["off", "batch_invariant"]
WORKSPACE_ALIGNMENT_BYTES = 256
_FP32_BYTES = 4
# Splits of a query token that can be a cluster: what every device with clusters has.
CLUSTER_SPLITS = (2, 4, 8)
# What a refused size should have been.
_SIZE_MEANINGS = {
    "batch": "how many requests a call has",
    "s_q": "how many query tokens a request has",
    "heads": "how many query heads there are",
    "topk": "how many columns indices has",
    "extra_topk": "how many columns extra_indices has, or leave it out",
    "num_splits": "1 up to the tiles of an index row, or leave it out",
}


@dataclass(frozen=True)
class DecodeShape:
    """Run-time shape of a call: `heads` query heads, `topk` columns of each index row, `extra_topk` of each row of the
    second cache (0: it is left out), `kv_heads` KV heads of the caches.
    """

    batch: int
    s_q: int
    heads: int
    topk: int
    extra_topk: int = 0
    kv_heads: int = 1

    @property
    def rows(self) -> int:
        """Query tokens of the call."""
        return self.batch * self.s_q


@dataclass(frozen=True)
class DecodePartition:
    """How a call is dealt to CTAs, and the workspace that it needs (0 bytes when rows are not split).

    The workspace holds lse_accum, fp32 [rows, num_splits, heads], at byte 0 and o_accum, fp32 [rows, num_splits, heads,
    d_v], at `o_accum_offset_bytes`. `kv_head_groups` of the `head_groups` share a KV head. `why` says where
    num_splits comes from; `untuned` that no measurement stands behind it.

    With `one_launch` the splits of a query token are a cluster and combine from its shared memory, so that there is no
    workspace.
    """

    rows: int
    row_tiles: int
    head_groups: int
    kv_head_groups: int
    group_heads: int
    num_splits: int
    main_ctas: int
    combine_ctas: int
    lse_accum_bytes: int
    o_accum_offset_bytes: int
    o_accum_bytes: int
    workspace_bytes: int
    one_launch: bool
    why: str
    untuned: bool

    @property
    def cluster(self) -> int:
        """CTAs of the main kernel that are launched together."""
        return self.num_splits if self.one_launch else 1

    def item(self, cta: int) -> tuple[int, int, int]:
        """(row, split, group) of a CTA of the main kernel."""
        rest, group = divmod(cta, self.head_groups)
        row, split = divmod(rest, self.num_splits)
        return row, split, group

    def tiles_of(self, split: int) -> range:
        """The tiles of an index row that a split takes."""
        return range(split, self.row_tiles, self.num_splits)


def partition(
    shape: DecodeShape,
    main_plan: KernelPlan,
    sm_count: int,
    determinism: Determinism,
    num_splits: int | None = None,
    one_launch: bool | None = None,
    given: str = "given by the caller",
) -> DecodePartition:
    """Deal a call to CTAs.

    A given `num_splits` is taken as it is (the launch guards judge it), and `given` says by whom; otherwise
    `batch_invariant` derives it from the row width, and `off` from the cost model. With `one_launch` rows that are
    split are combined by the main kernel itself, with None where the cost model counts on that. Raises GuardError for a
    size that is no whole number in range.
    """
    _require_sizes(shape, num_splits)
    main_tiles, extra_tiles = tiles_of(shape, main_plan)
    row_tiles = main_tiles + extra_tiles
    kv_head_groups, group_heads = deal_heads(shape.heads, shape.kv_heads, main_plan.variant.axis_int("n"))
    head_groups = shape.kv_heads * kv_head_groups
    untuned = False
    if num_splits is not None:
        why = given
    elif determinism == "batch_invariant":
        num_splits = batch_invariant_splits(shape.topk + shape.extra_topk, row_tiles)
        why = f"batch invariant: one split per {BATCH_INVARIANT_SPLIT_TOKENS} index columns, whatever the batch"
    else:
        load = split_load(shape, main_plan, sm_count, row_tiles, head_groups)
        load = replace(load, can_join=one_launch is not False and can_join(main_plan, shape))
        num_splits, untuned = choose_splits(load), True
        one_launch = one_launch or joins(load, num_splits)
        why = f"cost model: {load.units} CTAs of {row_tiles} tiles unsplit, {sm_count} SMs"
    joined = bool(one_launch) and num_splits > 1
    return _lay_out(shape, main_plan, row_tiles, (kv_head_groups, group_heads), num_splits, joined, why, untuned)


def can_join(main_plan: KernelPlan, shape: DecodeShape) -> bool:
    """Whether a main kernel can combine its splits itself: its body is built for it, and a CTA has all heads of a query
    token, so that the splits of one adjoin.
    """
    groups = shape.kv_heads * deal_heads(shape.heads, shape.kv_heads, main_plan.variant.axis_int("n"))[0]
    return main_plan.variant.body == hopper.BODY and groups == 1


def tiles_of(shape: DecodeShape, main_plan: KernelPlan) -> tuple[int, int]:
    """Tiles of an index row of the main cache, and of the second one."""
    tile_tokens = main_plan.constant("kTileTokens")
    return -(-shape.topk // tile_tokens), -(-shape.extra_topk // tile_tokens)


def split_load(shape: DecodeShape, main_plan: KernelPlan, sm_count: int, row_tiles: int, head_groups: int) -> SplitLoad:
    """What the cost model reads, for a shape and a kernel; a tile is the mean of both caches' tiles."""
    variant = main_plan.variant
    tile_tokens, d_v = main_plan.constant("kTileTokens"), variant.axis_int("dv")
    tile_flops = 2 * tile_tokens * variant.axis_int("n") * (variant.axis_int("dqk") + d_v)
    times = [
        count * tile_time_us(tile_tokens * kv_format(str(variant.axis(axis))).record_bytes, tile_flops)
        for axis, count in zip(("kv", "xkv"), tiles_of(shape, main_plan), strict=True)
        if count
    ]
    return SplitLoad(
        units=shape.rows * head_groups,
        row_tiles=row_tiles,
        tile_us=sum(times) / row_tiles,
        sm_count=sm_count,
        resident_ctas=resident_ctas(main_plan),
        partial_bytes=shape.rows * shape.heads * d_v * _FP32_BYTES,
    )


def _require_sizes(shape: DecodeShape, num_splits: int | None) -> None:
    sizes = {"batch": (shape.batch, 0), "s_q": (shape.s_q, 0), "heads": (shape.heads, 1), "topk": (shape.topk, 1)}
    sizes["extra_topk"] = (shape.extra_topk, 0)
    if num_splits is not None:
        sizes["num_splits"] = (num_splits, 1)
    for name, (value, least) in sizes.items():
        values = {"size": require_int(name, value), "least": least}
        check([SIZE_GUARD], values, name=name, meaning=_SIZE_MEANINGS[name])


def _lay_out(
    shape: DecodeShape,
    main_plan: KernelPlan,
    row_tiles: int,
    deal: tuple[int, int],
    num_splits: int,
    one_launch: bool,
    why: str,
    untuned: bool,
) -> DecodePartition:
    combines, head_groups = num_splits > 1 and not one_launch, shape.kv_heads * deal[0]
    partials = shape.rows * num_splits * shape.heads if combines else 0
    lse_accum_bytes = partials * _FP32_BYTES
    o_accum_bytes = lse_accum_bytes * main_plan.variant.axis_int("dv")
    o_accum_offset_bytes = round_up(lse_accum_bytes, WORKSPACE_ALIGNMENT_BYTES)
    return DecodePartition(
        rows=shape.rows,
        row_tiles=row_tiles,
        head_groups=head_groups,
        kv_head_groups=deal[0],
        group_heads=deal[1],
        num_splits=num_splits,
        main_ctas=shape.rows * num_splits * head_groups,
        combine_ctas=shape.rows * shape.heads if combines else 0,
        lse_accum_bytes=lse_accum_bytes,
        o_accum_offset_bytes=o_accum_offset_bytes,
        o_accum_bytes=o_accum_bytes,
        workspace_bytes=o_accum_offset_bytes + o_accum_bytes,
        one_launch=one_launch,
        why=why,
        untuned=untuned,
    )
