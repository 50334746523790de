"""Sparse decode cases on the host model: inputs that provoke, a launch as the runtime does it, an fp64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from host import Counts, HostKernel, Memory
from sparse_rows import bf16_bits, bf16_value, random_rows

from dsagen.arch import arch as arch_row
from dsagen.division import page_divisor
from dsagen.families.sparse_decode.family import FAMILY, NAME, caches_of, main_axes, plan_main
from dsagen.families.sparse_decode.geometry import Geometry, heads_per_cta
from dsagen.families.sparse_decode.op import DecodeShape, partition
from dsagen.families.sparse_decode.rows import Caches, part_segments
from dsagen.kv_format import KvFormat, Segment, kv_format
from dsagen.plan import Variant

LOG2_E = math.log2(math.e)
Tile = tuple[tuple[str, int | tuple[int, ...]], ...]


@dataclass(frozen=True)
class Extra:
    """The second cache of a call, and the lists that select from it."""

    fmt: str
    topk: int
    page_size: int = 64
    page_padding: int = 0
    lengths: tuple[int, ...] | None = None
    invalid: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call. `ramp` is by how many log2 units the logits rise from the first index column to the last."""

    fmt: str = "v32"
    heads: int = 16
    arch: str = "sm_90a"
    group: int = 0  # heads_n to plan for, 0: what the matrix picks
    tile: Tile = ()  # fields of the geometry, as shape() gives them; none: what the plan picks
    batch: int = 2
    s_q: int = 1
    topk: int = 65
    page_size: int = 64
    page_padding: int = 0  # rows' worth of bytes between pages
    splits: int = 1
    lengths: tuple[int, ...] | None = None  # per request; with s_q > 1 and twice as many entries per query
    invalid: float = 0.0  # part of the columns that holds -1, ids past the pool or other ids that are not there
    dead: tuple[tuple[int, int], ...] = ()  # ranges of columns without a valid id, in every index row
    sinks: tuple[float, ...] | None = None  # repeated over the heads
    poisoned_columns: tuple[
        int, ...
    ] = ()  # index columns of request 0 whose rows hold NaN; its results then do not count
    strided: bool = False
    ramp: float = 0.0
    base: float = 0.0  # log2 units added to every logit
    q_scale: float = 1.0
    row_scale: float = 1.0  # factor on scales, or on values where there are none
    poisoned_heads: tuple[int, ...] = ()  # heads whose q is NaN or, for every other one, infinity
    base2: bool = False
    extra: Extra | None = None
    seed: int = 1

    @property
    def sources(self) -> tuple[Case, ...]:
        """The call as each of its caches sees it."""
        if self.extra is None:
            return (self,)
        return replace(self, extra=None), replace(self, **vars(self.extra), extra=None, dead=(), seed=self.seed + 1000)


def shape(tile_tokens: int, stages: int, **fields: int | tuple[int, ...]) -> Tile:
    """A kernel geometry other than the preferred one."""
    return (("tile_tokens", tile_tokens), ("stages", stages), *fields.items())


def caches(case: Case) -> Caches:
    """The rows of the case's caches as a kernel sees them."""
    found = caches_of(case.fmt, case.extra.fmt if case.extra else None)
    assert isinstance(found, Caches)
    return found


@cache
def main_kernel(fmt: str, extra: str | None, heads_n: int, arch_name: str, tile: Tile) -> HostKernel:
    """Compiled main kernel of a variant."""
    found = caches_of(fmt, extra)
    assert isinstance(found, Caches)
    variant = Variant(NAME, "main", "mma_sync", arch_name, main_axes(found, heads_n, arch_row(arch_name)))
    return HostKernel(plan_main(variant, Geometry(heads_n, **dict(tile)) if tile else None))


@cache
def combine_kernel(d_v: int, arch_name: str) -> HostKernel:
    """Compiled combine."""
    return HostKernel(FAMILY.plan(Variant(NAME, "combine", "portable", arch_name, (("dv", d_v),))))


def heads_per_block(case: Case) -> int:
    """Padded heads of the variant that serves the case."""
    heads_n = case.group or heads_per_cta(caches(case), case.heads, arch_row(case.arch))
    assert heads_n is not None
    return heads_n


# ---- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """A cache with its lists. `bytes_of` are its tensors, `keys` rows by id, NaN where no column selects."""

    record: KvFormat
    bytes_of: dict[str, np.ndarray]
    page_strides: dict[str, int]
    page_size: int
    tokens: int
    keys: np.ndarray
    indices: np.ndarray
    indices_buffer: np.ndarray
    lengths: np.ndarray | None


@dataclass(frozen=True)
class Inputs:
    """Arrays of a case."""

    q: np.ndarray  # [batch, s_q, heads, d_qk], a view
    q_buffer: np.ndarray
    pools: tuple[Pool, ...]
    sinks: np.ndarray | None
    scale: float


def make_inputs(case: Case) -> Inputs:
    """Random inputs. Whatever no column selects is 0xff bytes: unselected rows, page padding, gaps between q rows."""
    record = kv_format(case.fmt)
    random = np.random.default_rng(case.seed)
    pools = tuple(_pool(source, np.random.default_rng(source.seed)) for source in case.sources)
    gap_h, gap_d = (3, 24) if case.strided else (0, 0)
    q_buffer = np.full((case.batch, case.s_q, case.heads + gap_h, record.d_qk + gap_d), 0xFFFF, np.uint16)
    q = q_buffer[:, :, : case.heads, : record.d_qk]
    values = random.standard_normal(q.shape) * case.q_scale
    scale = record.d_qk**-0.5
    if case.ramp or case.base:
        # With keys' last 64 dims at `level` this adds level log2 units; other heads rise less, not at all, or fall.
        steepness = np.resize([1.0, 0.0, 0.4, -1.0, 0.9], case.heads)[:, None]
        values[..., -64:] = steepness / (64 * scale * LOG2_E)
    q[...] = bf16_bits(values)
    for i, head in enumerate(case.poisoned_heads):
        q[:, :, head] = 0x7F80 if i % 2 else 0x7FC1
    sinks = None if case.sinks is None else np.resize(np.array(case.sinks, np.float32), case.heads)
    return Inputs(q, q_buffer, pools, sinks, scale)


def _pool(case: Case, random: np.random.Generator) -> Pool:
    record = kv_format(case.fmt)
    columns = case.batch * case.s_q * case.topk
    pages = -(-2 * columns // case.page_size) + 1
    tokens = pages * case.page_size
    indices_buffer = _indices(case, random, tokens)
    indices = indices_buffer[:, :, : case.topk]
    lengths = None if case.lengths is None else np.array(case.lengths, np.int32)
    ids, level = _selected(case, indices, lengths, tokens)
    segments, dequantised = random_rows(record, random, len(ids), case.base + case.ramp * level, case.row_scale)
    strides, pools = {}, {}
    for tensor in record.tensors:
        page_bytes = case.page_size * tensor.logical_stride_bytes
        strides[tensor.name] = -(-(page_bytes + case.page_padding * tensor.logical_stride_bytes) // 16) * 16
        pools[tensor.name] = np.full((pages - 1) * strides[tensor.name] + page_bytes, 0xFF, np.uint8)
    keys = np.full((tokens, record.d_qk), np.nan)
    poisoned = {int(indices[0, 0, column]) for column in case.poisoned_columns}
    for n, token in enumerate(ids):
        keys[token] = dequantised[n]
        for name, data in segments.items():
            segment = record.segment(name)
            start = _address(segment, int(token), case.page_size, strides[segment.tensor])
            pools[segment.tensor][start : start + segment.size_bytes] = 0xFF if int(token) in poisoned else data[n]
    return Pool(record, pools, strides, case.page_size, tokens, keys, indices, indices_buffer, lengths)


def _address(segment: Segment, token: int, page_size: int, page_stride: int) -> int:
    page, slot = divmod(token, page_size)
    section = segment.section_bytes_per_token * page_size
    return page * page_stride + section + slot * segment.token_stride_bytes + segment.offset_bytes


def live_columns(case: Case, lengths: np.ndarray | None, b: int, s: int) -> int:
    """Index columns of a query that count."""
    if lengths is None:
        return case.topk
    given = lengths[b] if len(lengths) == case.batch else lengths[b * case.s_q + s]
    return min(max(int(given), 0), case.topk)


def _indices(case: Case, random: np.random.Generator, tokens: int) -> np.ndarray:
    """Index rows with distinct valid ids, bad ids among them, and bad ids past the live columns."""
    gap = 5 if case.strided else 0
    bad = np.array([-1, -1, -1, tokens, tokens + 7, 2**31 - 1, -(2**31), -2], np.int32)
    out = random.choice(bad, (case.batch, case.s_q, case.topk + gap))
    ids = random.permutation(tokens)[: case.batch * case.s_q * case.topk].reshape(case.batch, case.s_q, case.topk)
    out[:, :, : case.topk] = ids
    lengths = None if case.lengths is None else np.array(case.lengths)
    for b in range(case.batch):
        for s in range(case.s_q):
            live = live_columns(case, lengths, b, s)
            # Past the live columns some ids are fine ones of rows that hold NaN, some are no ids.
            rest = random.random(case.topk - live) < 0.5
            out[b, s, live : case.topk][rest] = random.choice(bad, int(rest.sum()))
            hit = random.random(live) < case.invalid
            for begin, end in case.dead:
                hit[begin:end] = True
            out[b, s, :live][hit] = random.choice(bad, int(hit.sum()))
    return np.ascontiguousarray(out)


def _selected(
    case: Case, indices: np.ndarray, lengths: np.ndarray | None, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids that a live column names, and where in its index row (0..1)."""
    ids: list[int] = []
    level: list[float] = []
    for b in range(case.batch):
        for s in range(case.s_q):
            for column in range(live_columns(case, lengths, b, s)):
                if 0 <= indices[b, s, column] < tokens:
                    ids.append(int(indices[b, s, column]))
                    level.append(column / max(case.topk - 1, 1))
    return np.array(ids, np.int64), np.array(level)


def clean_q(case: Case, inputs: Inputs) -> np.ndarray:
    """Values of q, zero in the heads that are poisoned."""
    q = bf16_value(inputs.q)
    q[:, :, list(case.poisoned_heads)] = 0
    return q


# ---- reference ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """fp64 results, with what a relative error of every probability can move an output by: `spread` when all errors
    agree, `random_spread` (a standard deviation) when they are independent.
    """

    out: np.ndarray  # [batch, s_q, heads, d_v]
    spread: np.ndarray
    random_spread: np.ndarray
    lse: np.ndarray  # natural log; +inf where no token is valid
    largest_logit: float


def reference(case: Case, inputs: Inputs) -> Expected:
    """Softmax attention as defined: no tiles, no splits."""
    d_v = kv_format(case.fmt).d_v
    shape = (case.batch, case.s_q, case.heads)
    out, spread, random_spread = (np.zeros((*shape, d_v)) for _ in range(3))
    lse = np.full(shape, np.inf)
    largest = 0.0
    for b in range(case.batch):
        for s in range(case.s_q):
            selected = []
            for source, pool in zip(case.sources, inputs.pools, strict=True):
                ids = pool.indices[b, s, : live_columns(source, pool.lengths, b, s)].astype(np.int64)
                selected.append(pool.keys[ids[(ids >= 0) & (ids < pool.tokens)]])
            keys = np.concatenate(selected)
            if len(keys) == 0:
                continue
            logits = clean_q(case, inputs)[b, s] @ keys.T * inputs.scale
            top = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - top)
            lse[b, s] = top[:, 0] + np.log(weights.sum(axis=1))
            probability = np.exp(logits - lse[b, s][:, None])
            if inputs.sinks is not None:
                with np.errstate(over="ignore"):
                    probability /= 1 + np.exp(inputs.sinks.astype(np.float64) - lse[b, s])[:, None]
            out[b, s] = probability @ keys[:, :d_v]
            spread[b, s] = probability @ np.abs(keys[:, :d_v])
            random_spread[b, s] = np.sqrt(probability**2 @ keys[:, :d_v] ** 2)
            largest = max(largest, float(np.abs(logits).max()))
    assert not np.isnan(out).any()
    return Expected(out, spread, random_spread, lse, largest)


# ---- launch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """What the kernels wrote. The buffers include the gaps, which stay 0xff."""

    out: np.ndarray  # [batch, s_q, heads, d_v] bf16 bits, a view
    out_buffer: np.ndarray
    lse: np.ndarray  # [batch, heads, s_q]
    counts: Counts


def launch(case: Case, inputs: Inputs) -> Results:
    """Main and, for more than one split, combine."""
    record, heads_n = kv_format(case.fmt), heads_per_block(case)
    extra = case.extra
    main = main_kernel(case.fmt, extra.fmt if extra else None, heads_n, case.arch, case.tile)
    shape = DecodeShape(case.batch, case.s_q, case.heads, case.topk, extra.topk if extra else 0)
    part = partition(shape, main.plan, 132, "off", case.splits)
    memory = Memory()
    gap_h, gap_d = (1, 6) if case.strided else (0, 0)
    out_buffer = memory.output("out", (case.batch, case.s_q, case.heads + gap_h, record.d_v + gap_d), np.uint16)
    out = out_buffer[:, :, : case.heads, : record.d_v]
    lse = memory.output("lse", (case.batch, case.heads, case.s_q), np.float32)
    lse_accum = memory.output("lse_accum", (part.rows, case.splits, case.heads), np.float32)
    o_accum = memory.output("o_accum", (part.rows, case.splits, case.heads, record.d_v), np.float32)
    sinks = None if inputs.sinks is None else memory.input("attn_sink", inputs.sinks)
    common = {
        "s_q": case.s_q, "heads": case.heads, "num_splits": case.splits,
        "out": out, **_strides("out", out.strides, 2),
        "lse": lse, "lse_stride_b": lse.strides[0] // 4, "lse_stride_h": lse.strides[1] // 4,
        "lse_stride_s": lse.strides[2] // 4,
        "attn_sink": sinks, "lse_unit": 1.0 if case.base2 else math.log(2), "empty_lse": math.inf,
        "lse_accum": lse_accum, "o_accum": o_accum,
    }  # fmt: skip
    q = memory.input("q", inputs.q_buffer)
    sources: dict[str, int | float | np.ndarray | None] = {}
    for prefix, source, pool in zip(("", "extra_"), case.sources, inputs.pools, strict=False):
        sources |= _source_arguments(memory, prefix, source, pool)
    counts = main.launch(
        part.main_ctas,
        {
            **common,
            "q": q, **_strides("q", q.strides, 2),
            "head_groups": part.head_groups, "group_heads": part.group_heads,
            "scale_log2": inputs.scale * LOG2_E,
            **sources,
        },
        memory,
        seed=case.seed,
    )  # fmt: skip
    if case.splits > 1:
        combine = combine_kernel(record.d_v, case.arch)
        combine.launch(part.combine_ctas, common, memory, case.seed, predecessors=("lse_accum", "o_accum"))
    return Results(out, out_buffer, lse, counts)


def _source_arguments(
    memory: Memory, prefix: str, case: Case, pool: Pool
) -> dict[str, int | float | np.ndarray | None]:
    """Arguments of one cache and its lists."""
    rows, *others = pool.record.tensors
    tensors = {name: memory.input(f"{prefix}{name}", data) for name, data in pool.bytes_of.items()}
    indices = memory.input(f"{prefix}indices", pool.indices_buffer)
    lengths = None if pool.lengths is None else memory.input(f"{prefix}topk_length", pool.lengths)
    per_request = pool.lengths is not None and len(pool.lengths) == case.batch
    multiplier, shift = page_divisor(case.page_size)
    arguments: dict[str, int | float | np.ndarray | None] = {
        "kv": tensors[rows.name], "page_stride_bytes": pool.page_strides[rows.name],
        "row_stride_bytes": rows.io_stride_bytes, "page_multiplier": multiplier, "page_shift": shift,
        "page_size": case.page_size, "pool_tokens": pool.tokens, "topk": case.topk,
        "indices": indices, "indices_stride_b": indices.strides[0] // 4, "indices_stride_s": indices.strides[1] // 4,
        "topk_length": lengths, "length_stride_b": 1 if per_request else case.s_q,
        "length_stride_s": 0 if per_request else 1,
    }  # fmt: skip
    for segment in part_segments(pool.record):
        name = others[0].name if others else rows.name
        arguments["kv_part"] = tensors[name][segment.section_bytes_per_token * case.page_size :]
        arguments["part_page_stride_bytes"] = pool.page_strides[name]
        arguments["part_row_stride_bytes"] = segment.token_stride_bytes
    return {f"{prefix}{name}": value for name, value in arguments.items()}


def _strides(name: str, strides: tuple[int, ...], element_bytes: int) -> dict[str, int]:
    return {f"{name}_stride_{axis}": stride // element_bytes for axis, stride in zip("bsh", strides, strict=False)}


def check(case: Case) -> Results:
    """Run a case and compare; returns what the kernels wrote."""
    inputs = make_inputs(case)
    expected, found = reference(case, inputs), launch(case, inputs)
    # Two roundings to bf16 (P, result), each 2^-8 at most, and fp32 logits; results near 2^-126 may be flushed.
    logit_error = 2.0**-20 * (1 + expected.largest_logit)
    out = bf16_value(found.out)
    lse = found.lse.astype(np.float64).transpose(0, 2, 1) * (math.log(2) if case.base2 else 1)
    ignored = np.zeros(lse.shape, bool)
    ignored[:, :, list(case.poisoned_heads)] = True
    ignored[: 1 if case.poisoned_columns else 0] = True
    assert np.isnan(lse[ignored & np.isfinite(expected.lse)]).all(), "lse: what is not a number became one"
    assert np.isnan(out[ignored & np.isfinite(expected.lse)]).all(), "out: what is not a number became one"
    out[ignored], lse[ignored] = expected.out[ignored], expected.lse[ignored]
    _check_out(out, expected, logit_error)
    empty = np.isinf(expected.lse)
    assert (lse[empty] == np.inf).all()
    assert (out[empty] == 0).all()
    worst = np.abs(lse[~empty] - expected.lse[~empty]).max(initial=0)
    assert worst <= 4 * logit_error, f"lse: off by {worst:.3g}, the limit is {4 * logit_error:.3g}"
    gaps = np.ones(found.out_buffer.shape, bool)
    gaps[:, :, : case.heads, : out.shape[-1]] = False
    assert (found.out_buffer[gaps] == 0xFFFF).all(), "written between the rows of out"
    return found


def _check_out(out: np.ndarray, expected: Expected, logit_error: float) -> None:
    """Every element within the bound that holds for any roundings; every head row, as a whole, within what independent
    roundings make likely. The second finds one wrong token among hundreds.
    """
    assert not np.isnan(out).any(), (
        f"{np.isnan(out).sum()} NaN outputs, first at {np.argwhere(np.isnan(out))[0].tolist()}"
    )
    error = np.abs(out - expected.out)
    limit = expected.spread * (2.0**-7 * 1.01 + 2 * logit_error) + 2.0**-125
    wrong = np.argwhere(error > limit)
    assert len(wrong) == 0, f"out: {(error / limit).max():.3g} times the limit, at {wrong[:5].tolist()} and others"
    row_limit = (2.0**-8 + 2 * logit_error) * (_rms(expected.random_spread) + _rms(expected.out)) + 2.0**-125
    rows = np.argwhere(_rms(error) > row_limit)
    assert len(rows) == 0, (
        f"out: rms {(_rms(error) / row_limit).max():.3g} times the limit, in rows {rows[:5].tolist()}"
    )


def _rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).mean(axis=-1))
