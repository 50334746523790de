"""Top-k as nvcc compiles it, on the emulator, with barriers removed.

Its results are held to the reference by test_conformance_emulated.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from decode import Kernel, compile_ptx

from dsagen.division import page_divisor
from dsagen.emulator import Memory
from dsagen.errors import EmulatorError
from dsagen.families.topk.family import FAMILY, NAME
from dsagen.families.topk.geometry import preferred_candidates
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.plan import Variant
from dsagen.render import render

POISON = -77
PAGE = 61
ROWS, WIDTH, GAP = 4, 9001, 7  # rows that start off 16 B, and one element more than a round number
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@cache
def kernel(score: str, arch: str) -> Kernel:
    variant = Variant(NAME, "main", "row_select", arch, (("score", score), ("cand", preferred_candidates(score))))
    plan = FAMILY.plan(variant)
    return Kernel(plan, compile_ptx(render(plan).text, arch))


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


def problem(call: Call, select: Kernel, seed: int) -> str:
    """What is wrong with a launch's results, empty when nothing is; EmulatorError for what a kernel must not do."""
    out = torch.full((ROWS, call.k + 3), POISON, dtype=torch.int32)
    raw, counts = out.clone(), torch.full((ROWS,), POISON, dtype=torch.int32)
    memory = Memory()
    multiplier, shift = page_divisor(PAGE)
    arguments = {
        "scores": memory.add("scores", call.padded, writable=False), "row_stride": call.padded.stride(0),
        "width": WIDTH, "k": call.k, "drops_neg_inf": 0,
        "starts": memory.add("starts", call.starts, writable=False),
        "lengths": memory.add("lengths", call.lengths, writable=False),
        "out": memory.add("out", out), "out_stride": out.stride(0),
        "raw": memory.add("raw", raw), "raw_stride": raw.stride(0),
        "counts": memory.add("counts", counts), "offsets": 0,
        "page_table": memory.add("page_table", call.table, writable=False), "table_stride": call.table.stride(0),
        "table_rows": ROWS, "table_columns": call.table.shape[1], "table_of_row": 0, "table_starts": 0,
        "page_multiplier": multiplier, "page_shift": shift, "page_size": PAGE,
    }  # fmt: skip
    select.launch(ROWS, arguments, memory, seed=seed)

    indices, how_many = topk_reference(call.scores, call.k, lengths=call.lengths, starts=call.starts)
    ids = translate_reference(indices, page_table=call.table, page_size=PAGE)
    poison = torch.full((ROWS, 3), POISON)
    wanted = {"raw": (raw, torch.cat((indices, poison), 1)), "counts": (counts, how_many)}
    wanted["out"] = (out, torch.cat((ids, poison), 1))
    return ", ".join(name for name, (found, want) in wanted.items() if not torch.equal(found.long(), want))


def outcome(select: Kernel, score: str) -> str:
    """The first complaint over some schedules and inputs."""
    for values in (normal, one_binade, few_values):
        call = make_call(values, score, 512)
        for seed in range(3):
            try:
                found = problem(call, select, seed)
            except EmulatorError as error:
                return str(error)
            if found:
                return found
    return ""


@pytest.mark.parametrize("score", DTYPES)
def test_every_removed_barrier_is_noticed(score: str) -> None:
    select = kernel(score, "sm_90a")
    assert outcome(select, score) == ""
    barriers = list(re.finditer(r"^\s*(?:bar|barrier)\.(?:cta\.)?sync [^;]*;", select.ptx, re.MULTILINE))
    assert len(barriers) >= 5
    removed = [replace(select, ptx=select.ptx[: b.start()] + select.ptx[b.end() :]) for b in barriers]
    missed = [
        select.ptx[: b.start()].count("\n") + 1 for b, m in zip(barriers, removed, strict=True) if not outcome(m, score)
    ]
    assert missed == []
