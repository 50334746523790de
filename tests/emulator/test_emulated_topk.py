"""Top-k as nvcc compiles it, on the emulator, with barriers removed.

Its results are held to the reference by test_conformance_emulated.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from decode import Kernel, compile_ptx

from dsagen.arch import arch as arch_row
from dsagen.division import page_divisor
from dsagen.emulator import Memory
from dsagen.families.topk.family import FAMILY, stream_variant
from dsagen.families.topk.geometry import MOST_THREADS
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.plan import Variant
from dsagen.render import render

POISON = -77
PAGE = 61
ROWS, WIDTH, GAP = 4, 9001, 7  # rows that start off 16 B, and one element more than a round number
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = 3
WORKSPACE = ("histograms", "counters", "lists")


@cache
def kernel(score: str, arch: str) -> Kernel:
    return compiled(stream_variant(score, arch_row(arch), MOST_THREADS))


@cache
def compiled(variant: Variant) -> Kernel:
    plan = FAMILY.plan(variant)
    return Kernel(plan, compile_ptx(render(plan).text, variant.arch))


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=generator)


def few_values(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, (ROWS, WIDTH), generator=generator).float()


def one_binade(generator: torch.Generator) -> torch.Tensor:
    """More candidates than the buffer holds share their first digit."""
    return 1 + torch.rand(ROWS, WIDTH, generator=generator) / 1024


@dataclass(frozen=True)
class Call:
    """Tensors of a call: windows of all kinds over padded rows, and a page table with a hole."""

    k: int
    padded: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        return self.padded[:, :WIDTH]


def make_call(values: Callable[[torch.Generator], torch.Tensor], score: str, k: int) -> Call:
    generator = torch.Generator().manual_seed(k)
    padded = torch.full((ROWS, WIDTH + GAP), math.nan, dtype=DTYPES[score])
    padded[:, :WIDTH] = values(generator)
    pages = -(-WIDTH // PAGE)
    table = torch.randperm(ROWS * pages, generator=generator).to(torch.int32).reshape(ROWS, pages)
    table[1, 5] = -1  # a page that was given back
    starts = torch.tensor([0, 3, 1000, 0], dtype=torch.int32)
    return Call(k, padded, starts, torch.tensor([WIDTH, WIDTH - 3, 700, 0], dtype=torch.int32), table)


def problem(call: Call, select: Kernel, seed: int, schedule: str | None = None, count: Kernel | None = None) -> str:
    """What is wrong with a launch's results, empty when nothing is; EmulatorError for what a kernel must not do.

    With `count`, the kernel that goes first, a row is shared among PARTS blocks.
    """
    out = torch.full((ROWS, call.k + 3), POISON, dtype=torch.int32)
    raw, counts = out.clone(), torch.full((ROWS,), POISON, dtype=torch.int32)
    memory = Memory()
    multiplier, shift = page_divisor(PAGE)
    arguments = {
        "scores": memory.add("scores", call.padded, writable=False), "row_stride": call.padded.stride(0),
        "width": WIDTH, "k": call.k, "drops_neg_inf": 0, "rows": ROWS, "row_step": ROWS, "ordered": 1,
        "starts": memory.add("starts", call.starts, writable=False),
        "lengths": memory.add("lengths", call.lengths, writable=False),
        "out": memory.add("out", out), "out_stride": out.stride(0),
        "raw": memory.add("raw", raw), "raw_stride": raw.stride(0),
        "counts": memory.add("counts", counts), "offsets": 0,
        "page_table": memory.add("page_table", call.table, writable=False), "table_stride": call.table.stride(0),
        "table_rows": ROWS, "table_columns": call.table.shape[1], "table_of_row": 0, "table_starts": 0,
        "page_multiplier": multiplier, "page_shift": shift, "page_size": PAGE,
    }  # fmt: skip
    if count is None:
        select.launch(ROWS, arguments, memory, seed=seed, schedule=schedule)
    else:
        arguments |= _share_rows(call.k, select, memory)
        count.launch(ROWS * PARTS, arguments, memory, seed=seed, schedule=schedule)
        second = memory.after(*WORKSPACE) if select.plan.overlaps_previous else memory
        select.launch(ROWS * PARTS, arguments, second, seed=seed, schedule=schedule)

    indices, how_many = topk_reference(call.scores, call.k, lengths=call.lengths, starts=call.starts)
    ids = translate_reference(indices, page_table=call.table, page_size=PAGE)
    poison = torch.full((ROWS, 3), POISON)
    wanted = {"raw": (raw, torch.cat((indices, poison), 1)), "counts": (counts, how_many)}
    wanted["out"] = (out, torch.cat((ids, poison), 1))
    return ", ".join(name for name, (found, want) in wanted.items() if not torch.equal(found.long(), want))


def _share_rows(k: int, select: Kernel, memory: Memory) -> dict[str, int]:
    slots = -(-k // 4) * 4
    stride = max(-(-select.plan.constant("kElements") // 4) * 4, PARTS * slots)
    sizes = (1 << select.plan.constant("kDigitBits"), 2, stride)
    addresses = {
        name: memory.add(name, torch.zeros(ROWS, size, dtype=torch.int32), initialised=name != "lists")
        for name, size in zip(WORKSPACE, sizes, strict=True)
    }
    return {"parts": PARTS, "part_slots": slots, "list_stride": stride, **addresses}
