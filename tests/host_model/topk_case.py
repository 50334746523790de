"""Top-k cases on the host model: a launch as the runtime does it, and a reference by stable sorting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from host import Counts, HostKernel, Memory

from dsagen.arch import arch as arch_row
from dsagen.division import page_divisor
from dsagen.families.topk.family import (
    COUNT,
    NAME,
    SELECT,
    STREAM,
    plan_resident,
    plan_split,
    plan_stream,
    resident_variant,
    split_variants,
    stream_variant,
)
from dsagen.families.topk.geometry import RESIDENT_SHAPES, Geometry, ResidentGeometry
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.spec import load_spec

UNSELECTED = -1
ROW_GAP = 5  # elements between rows
FAR_ROW = (1 << 32) + 64


@dataclass(frozen=True)
class Stream:
    """A small block that sweeps a row in global memory."""

    threads: int = 64
    digit_bits: int = 11
    in_flight: int = 2
    elements: int = 64
    bitmap_words: int = 128

    def plan(self, score: str, arch: str) -> KernelPlan:
        """The kernel's plan."""
        g = Geometry(score, self.threads, self.digit_bits, self.in_flight, self.elements, self.bitmap_words)
        return plan_stream(stream_variant(score, arch_row(arch), self.threads), g)


@dataclass(frozen=True)
class Resident:
    """A small block that holds a row in shared memory."""

    threads: int = 64
    digit_bits: int = 11
    in_flight: int = 2
    elements: int = 64
    words: int = 16
    ctas: int = 2

    def plan(self, score: str, arch: str) -> KernelPlan:
        """The kernel's plan."""
        row_words = self.threads * self.words * (1 if score == "fp32" else 2) // 32
        bitmap_words = -(-row_words // self.threads) * self.threads
        g = ResidentGeometry(
            score, self.threads, self.digit_bits, self.in_flight, self.elements, bitmap_words, words=self.words
        )
        row = arch_row(arch)
        return plan_resident(resident_variant(score, row, RESIDENT_SHAPES[row.smem_class][0][0]), g)


@dataclass(frozen=True)
class Built:
    """A kernel that is built: the number of it in the family's order."""

    number: int
    ctas: int = 2

    def plan(self, score: str, arch: str) -> KernelPlan:
        """The kernel's plan."""
        spec = load_spec({"model": "v32", "heads": 8, "archs": [arch], "ops": [NAME], "scores": score})
        return expand(spec).plans()[self.number]


@dataclass(frozen=True)
class Split:
    """Small blocks that share a row, the built ones if `built`."""

    parts: int = 3
    threads: int = 64
    digit_bits: int = 11
    in_flight: int = 2
    elements: int = 64
    bitmap_words: int = 128
    built: bool = False

    def plan_of(self, kernel: str, score: str, arch: str) -> KernelPlan:
        """The plan of one of the two kernels."""
        g = Geometry(score, self.threads, self.digit_bits, self.in_flight, self.elements, self.bitmap_words)
        variant = next(v for v in split_variants(score, arch_row(arch)) if v.kernel == kernel)
        return plan_split(variant, None if self.built else g)


Block = Stream | Resident | Built | Split
SMALL = Stream()
HELD = Resident()
SHARED = Split()
SMALL_BUILT, LARGE_BUILT, STREAM_BUILT, STREAM_BY_TWO_BUILT = (Built(number) for number in range(4))


@cache
def kernel(score: str, block: Block, arch: str) -> HostKernel:
    """Compiled kernel for a dtype of scores."""
    return HostKernel(block.plan(score, arch))


@cache
def split_kernels(score: str, block: Split, arch: str) -> tuple[HostKernel, HostKernel]:
    """The two kernels that share a row, in the order of their launches."""
    count, select = (HostKernel(block.plan_of(kernel, score, arch)) for kernel in (COUNT, SELECT))
    return count, select


@dataclass(frozen=True)
class Pages:
    """Page tables of a call. `table_of_row` None: as many tables as rows."""

    size: int
    table: np.ndarray  # int32 [tables, columns]
    table_of_row: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """One call over fp32 `scores` [rows, width], which for bf16 are cut to their upper halves."""

    scores: np.ndarray
    k: int
    score: str = "fp32"
    lengths: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    drops_neg_inf: bool = False
    ordered: bool = True
    pages: Pages | None = None
    offsets: tuple[int, ...] | None = None
    block: Block = SMALL
    misaligned: int = 0  # elements by which the first row is off a multiple of 16 B
    unreadable: bool = False  # no score but the first lies in memory
    far: bool = False  # rows are further apart than 32 bits of elements reach, and only the last one lies in memory
    arch: str = "sm_90a"
    seed: int = 1


@dataclass(frozen=True)
class Result:
    """What a launch wrote."""

    out: np.ndarray
    raw: np.ndarray
    counts: np.ndarray
    run: Counts


def words_of(call: Call) -> np.ndarray:
    """The scores' bits as the kernel reads them."""
    bits = np.ascontiguousarray(call.scores, np.float32).view(np.uint32)
    return bits if call.score == "fp32" else (bits >> 16).astype(np.uint16)


def launch(call: Call) -> Result:
    """Run one block a row. Outputs hold 0xff bytes before, and lie in rows wider than k."""
    words, memory = words_of(call), Memory()
    rows, width = words.shape
    stride = FAR_ROW if call.far else width + ROW_GAP
    buffer = np.full(call.misaligned + rows * (width + ROW_GAP), -1, np.int64).astype(
        words.dtype
    )  # NaN wherever no row is
    for row in range(rows):
        begin = call.misaligned + row * (width + ROW_GAP)
        buffer[begin : begin + width] = words[row]
    scores = memory.input("scores", buffer[:1] if call.unreadable else buffer)[call.misaligned :]
    out = memory.output("out", (rows, call.k + 3), np.int32)
    raw = memory.output("raw", (rows, call.k + 1), np.int32)
    counts = memory.output("counts", (rows,), np.int32)
    out[...], raw[...], counts[...] = -77, -77, -77
    kernels = (
        split_kernels(call.score, call.block, call.arch)
        if isinstance(call.block, Split)
        else (kernel(call.score, call.block, call.arch),)
    )
    ctas = _ctas(call.block, kernels[0].plan, rows)
    pages = call.pages
    table = None if pages is None else memory.input("page_table", pages.table.astype(np.int32))
    multiplier, shift = page_divisor(1 if pages is None else pages.size)

    def rows_of(name: str, values: tuple[int, ...] | None) -> np.ndarray | None:
        return None if values is None else memory.input(name, np.array(values, np.int32))

    last_row = scores[(rows - 1) * (width + ROW_GAP) :] if call.far else scores
    params: dict[str, object] = {
        "scores": last_row.ctypes.data - (rows - 1) * FAR_ROW * words.itemsize if call.far else scores,
        "row_stride": stride,
        "width": width,
        "rows": rows,
        "row_step": ctas,
        "k": call.k,
        "ordered": int(call.ordered),
        "starts": rows_of("starts", call.starts),
        "lengths": rows_of("lengths", call.lengths),
        "drops_neg_inf": int(call.drops_neg_inf),
        "out": out,
        "out_stride": out.shape[1],
        "raw": raw,
        "raw_stride": raw.shape[1],
        "counts": counts,
        "offsets": rows_of("offsets", call.offsets),
        "page_table": table,
        "table_stride": 0 if table is None else table.shape[1],
        "table_rows": 0 if table is None else table.shape[0],
        "table_columns": 0 if table is None else table.shape[1],
        "table_of_row": rows_of("table_of_row", None if pages is None else pages.table_of_row),
        "table_starts": rows_of("table_starts", None if pages is None else pages.starts),
        "page_multiplier": multiplier,
        "page_shift": shift,
        "page_size": 1 if pages is None else pages.size,
    }
    workspace: tuple[np.ndarray, ...] = ()
    if isinstance(call.block, Split):
        workspace = _share(params, memory, call, kernels[1].plan, rows)
    for host_kernel in kernels:
        run = host_kernel.launch(ctas, params, memory, call.seed)
    for array in workspace[:2]:
        assert not array.any(), "the workspace is not as it was found"
    assert (out[:, call.k :] == -77).all(), "wrote past the k slots"
    assert (raw[:, call.k :] == -77).all(), "wrote past the k slots of raw"
    return Result(out[:, : call.k].copy(), raw[:, : call.k].copy(), counts.copy(), run)


def _ctas(block: Block, plan: KernelPlan, rows: int) -> int:
    if isinstance(block, Split):
        return rows * block.parts
    return rows if plan.variant.body == STREAM else min(rows, block.ctas)


def _share(
    params: dict[str, object], memory: Memory, call: Call, select: KernelPlan, rows: int
) -> tuple[np.ndarray, ...]:
    """The arguments of kernels that share rows; their workspace, of which all but the lists is zeros between calls."""
    assert isinstance(call.block, Split)
    slots = -(-call.k // 4) * 4
    stride = max(-(-select.constant("kElements") // 4) * 4, call.block.parts * slots)
    histograms = memory.output("histograms", (rows, 1 << select.constant("kDigitBits")), np.uint32)
    counters = memory.output("counters", (rows, 2), np.uint32)
    lists = memory.output("lists", (rows, stride), np.int32)
    histograms[...], counters[...], lists[...] = 0, 0, -55
    params |= {
        "parts": call.block.parts,
        "part_slots": slots,
        "histograms": histograms,
        "counters": counters,
        "lists": lists,
        "list_stride": stride,
    }
    return histograms, counters, lists


def selected(call: Call, row: int) -> np.ndarray:
    """Indices that the row's selection must hold, ascending: the first k of a stable sort, NaN last."""
    words = words_of(call)
    bits = words.astype(np.uint32) << (0 if call.score == "fp32" else 16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = bits.view(np.float32)[row].astype(np.float64)
    width = values.size
    start = 0 if call.starts is None else min(max(call.starts[row], 0), width)
    length = width - start if call.lengths is None else min(max(call.lengths[row], 0), width - start)
    window = values[start : start + length]
    # NaN sorts below -inf, and numpy's stable sort keeps the order of equal elements.
    rank = np.lexsort((np.arange(length), -np.nan_to_num(window, nan=-np.inf), np.isnan(window)))
    if call.drops_neg_inf:
        rank = rank[window[rank] > -np.inf]
    return np.sort(rank[: call.k])


def translated(call: Call, row: int, indices: np.ndarray) -> np.ndarray:
    """What indices become on output."""
    ids = indices.astype(np.int64)
    if call.pages is not None:
        pages = call.pages
        table_row = row if pages.table_of_row is None else pages.table_of_row[row]
        if not 0 <= table_row < len(pages.table):
            return np.full(len(ids), UNSELECTED)
        columns = ids // pages.size + (0 if pages.starts is None else pages.starts[row])
        exists = (columns >= 0) & (columns < pages.table.shape[1])
        entries = pages.table[table_row].astype(np.int64)[np.where(exists, columns, 0)]
        ids = np.where(exists & (entries >= 0), entries * pages.size + ids % pages.size, -(2**40))
    ids = ids + (0 if call.offsets is None else call.offsets[row])
    return np.where((ids >= 0) & (ids < 2**31), ids, UNSELECTED)


def check(call: Call) -> Result:
    """Launch, and compare every slot with the reference; without `ordered`, slots as they come."""
    result = launch(call)
    for row in range(len(call.scores)):
        indices = selected(call, row)
        rest = [UNSELECTED] * (call.k - len(indices))
        raw = result.raw[row]
        assert result.counts[row] == len(indices), row
        if not call.ordered:
            assert np.array_equal(np.sort(raw[: len(indices)]), indices), row
            indices = raw[: len(indices)]
        assert raw.tolist() == [*indices.tolist(), *rest], row
        assert result.out[row].tolist() == [*translated(call, row, indices).tolist(), *rest], row
    return result
