"""Top-k on the emulator: calls that take every way through its kernels, as nvcc compiles them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from decode import Kernel
from ptx_texts import ptx_of

from dsagen.arch import arch as arch_row
from dsagen.division import page_divisor
from dsagen.emulator import Memory
from dsagen.families.topk.family import CLUSTER, FAMILY, cluster_variant, resident_variant, stream_variant
from dsagen.families.topk.geometry import MOST_THREADS
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.plan import Variant

POISON = -77
PAGE = 61
ROWS, GAP = 6, 7  # rows that start off 16 B
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WORKSPACE = ("histograms", "counters", "lists")


@cache
def kernel(score: str, arch: str) -> Kernel:
    return compiled(stream_variant(score, arch_row(arch), MOST_THREADS))


@cache
def resident_kernel(score: str, arch: str) -> Kernel:
    return compiled(resident_variant(score, arch_row(arch), MOST_THREADS))


@cache
def cluster_kernel(score: str, arch: str) -> Kernel:
    return compiled(cluster_variant(score, arch_row(arch)))


@cache
def compiled(variant: Variant) -> Kernel:
    plan = FAMILY.plan(variant)
    return Kernel(plan, ptx_of(plan))


def normal(generator: torch.Generator, width: int) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=generator)


def few_values(generator: torch.Generator, width: int) -> torch.Tensor:
    return torch.randint(-2, 3, (ROWS, width), generator=generator).float()


def one_binade(generator: torch.Generator, width: int) -> torch.Tensor:
    """More candidates than the buffer holds share their first digit."""
    return 1 + torch.rand(ROWS, width, generator=generator) / 1024


def one_digit(generator: torch.Generator, width: int) -> torch.Tensor:
    """All share their first digit, and bf16 ones differ in the second."""
    return 1 + torch.rand(ROWS, width, generator=generator) / 4


def thin_top(generator: torch.Generator, width: int) -> torch.Tensor:
    """All share their first digit, and the larger a bf16 value is, the fewer have it."""
    return 1.25 - 0.25 * torch.rand(ROWS, width, generator=generator) ** 0.125


def mostly_top(generator: torch.Generator, width: int) -> torch.Tensor:
    """All share their first digit, and most are the largest: more than a guess in between leads one to expect."""
    values = 1 + torch.rand(ROWS, width, generator=generator) / 8
    return values.masked_fill(torch.rand(ROWS, width, generator=generator) < 0.6, 1 + 31 / 128)


def equal(generator: torch.Generator, width: int) -> torch.Tensor:
    """No list has room for those that tie, so that the last sweep writes them."""
    return torch.full((ROWS, width), 3.0)


def descending(generator: torch.Generator, width: int) -> torch.Tensor:
    """The first part has all that is selected."""
    return normal(generator, width).sort(descending=True).values


def eighths(generator: torch.Generator, width: int) -> torch.Tensor:
    """More equals in question than are compared all with all, and a list has room for them."""
    return (normal(generator, width) * 8).round() / 8


def far_above(generator: torch.Generator, width: int) -> torch.Tensor:
    """Of so few that most samples miss enough of them, and far above all others."""
    values = normal(generator, width).abs()
    values[:, torch.randperm(width, generator=generator)[:600]] *= 1e6
    return values


def all_binades(generator: torch.Generator, width: int) -> torch.Tensor:
    """Few have the same first digit."""
    return torch.exp2(torch.rand(ROWS, width, generator=generator) * 200 - 100)


def mostly_nan(generator: torch.Generator, width: int) -> torch.Tensor:
    """NaN, but for a few."""
    values = normal(generator, width)
    return values.masked_fill(torch.rand(ROWS, width, generator=generator) < 0.99, math.nan)


def sampled_apart(generator: torch.Generator, width: int, by: float) -> torch.Tensor:
    """Vectors that a sample of 512 threads takes of the whole row are larger than all others `by` so much."""
    each = width // 4 // 512
    threads = torch.arange(512)
    first = threads + threads // 2 % 16 * (each // 2) // 16 * 512
    taken = torch.cat((first, first + each // 2 * 512))[:, None] * 4 + torch.arange(4)
    values = normal(generator, width)
    values[:, taken.reshape(-1)] += by
    return values


def sampled_above(generator: torch.Generator, width: int) -> torch.Tensor:
    """Too few reach what the sample of an fp32 row says."""
    return sampled_apart(generator, width, 50.0)


def sampled_below(generator: torch.Generator, width: int) -> torch.Tensor:
    """Far too many reach what the sample of an fp32 row says."""
    return sampled_apart(generator, width, -50.0)


def mostly_dropped(generator: torch.Generator, width: int) -> torch.Tensor:
    """-inf, but for a few."""
    return torch.randn(ROWS, width, generator=generator).masked_fill(
        torch.rand(ROWS, width, generator=generator) > 0.02, -math.inf
    )


@dataclass(frozen=True)
class Scores:
    """What a call is made of: values of rows of a width, of which it selects `k`.

    `ctas` take turns with the rows, or `parts` share each, or clusters of `cluster`.
    """

    values: Callable[[torch.Generator, int], torch.Tensor]
    width: int = 9001
    k: int = 512
    ordered: bool = True
    drops: bool = False
    ctas: int = ROWS
    parts: int = 3
    cluster: int = 1


@dataclass(frozen=True)
class Call:
    """Tensors of a call: windows of all kinds over padded rows, and a page table with a hole."""

    of: Scores
    padded: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        return self.padded[:, : self.of.width]


@cache
def make_call(of: Scores, score: str) -> Call:
    generator, width = torch.Generator().manual_seed(of.k), of.width
    padded = torch.full((ROWS, width + GAP), math.nan, dtype=DTYPES[score])
    padded[:, :width] = of.values(generator, width)
    pages = -(-width // PAGE)
    table = torch.randperm(ROWS * pages, generator=generator).to(torch.int32).reshape(ROWS, pages)
    table[1, 5] = -1  # a page that was given back
    starts = torch.tensor([0, 3, 1000, 0, 5, 0], dtype=torch.int32)
    lengths = torch.tensor([width, width - 3, 700, 0, width - 8, 300], dtype=torch.int32)
    return Call(of, padded, starts, lengths, table)


def problem(
    call: Call,
    select: Kernel,
    seed: int = 0,
    schedule: str | None = None,
    count: Kernel | None = None,
    row_stride: int | None = None,
) -> str:
    """What is wrong with a launch's results, empty when nothing is; EmulatorError for what a kernel must not do.

    With `count`, the kernel that goes first, the call's parts share each row. With a `row_stride` rows of scores lie so
    many elements apart, with nothing in between.
    """
    of = call.of
    out = torch.full((ROWS, of.k + 3), POISON, dtype=torch.int32)
    raw, counts = out.clone(), torch.full((ROWS,), POISON, dtype=torch.int32)
    memory = Memory()
    multiplier, shift = page_divisor(PAGE)
    arguments = {
        **_place_scores(call.padded, memory, row_stride),
        "width": of.width, "k": of.k, "drops_neg_inf": int(of.drops), "rows": ROWS, "row_step": of.ctas,
        "ordered": int(of.ordered),
        "starts": memory.add("starts", call.starts, writable=False),
        "lengths": memory.add("lengths", call.lengths, writable=False),
        "out": memory.add("out", out), "out_stride": out.stride(0),
        "raw": memory.add("raw", raw), "raw_stride": raw.stride(0),
        "counts": memory.add("counts", counts), "offsets": 0,
        "page_table": memory.add("page_table", call.table, writable=False), "table_stride": call.table.stride(0),
        "table_rows": ROWS, "table_columns": call.table.shape[1], "table_of_row": 0, "table_starts": 0,
        "page_multiplier": multiplier, "page_shift": shift, "page_size": PAGE,
    }  # fmt: skip
    left = ""
    if select.plan.variant.body == CLUSTER:
        select.launch(ROWS * of.cluster, arguments, memory, seed=seed, schedule=schedule, cluster=of.cluster)
    elif count is None:
        select.launch(of.ctas, arguments, memory, seed=seed, schedule=schedule)
    else:
        workspace = _workspace(of, select)
        arguments |= _share_rows(of, workspace, memory)
        count.launch(ROWS * of.parts, arguments, memory, seed=seed, schedule=schedule)
        second = memory.after(*WORKSPACE) if select.plan.overlaps_previous else memory
        select.launch(ROWS * of.parts, arguments, second, seed=seed, schedule=schedule)
        left = ", ".join(name for name in WORKSPACE[:2] if workspace[name].any())

    indices, how_many = topk_reference(
        call.scores, of.k, lengths=call.lengths, starts=call.starts, drop_neg_inf=of.drops
    )
    poison = torch.full((ROWS, 3), POISON)
    found = raw.long() if of.ordered else torch.cat((_ascending(raw[:, : of.k]), raw[:, of.k :].long()), 1)
    ids = translate_reference(raw[:, : of.k].long(), page_table=call.table, page_size=PAGE)
    wanted = {"raw": (found, torch.cat((indices, poison), 1)), "counts": (counts, how_many)}
    wanted["out"] = (out, torch.cat((ids, poison), 1))
    wrong = ", ".join(name for name, (got, want) in wanted.items() if not torch.equal(got.long(), want))
    return wrong + (f" left in the workspace: {left}" if left else "")


def _place_scores(padded: torch.Tensor, memory: Memory, row_stride: int | None) -> dict[str, int]:
    if row_stride is None:
        return {"scores": memory.add("scores", padded, writable=False), "row_stride": padded.stride(0)}
    base = 1 << 40
    for number, row in enumerate(padded):
        address = base + number * row_stride * padded.element_size()
        memory.add(f"row {number}", row, writable=False, address=address)
    return {"scores": base, "row_stride": row_stride}


def _ascending(raw: torch.Tensor) -> torch.Tensor:
    """Indices in order, then -1."""
    last = 1 << 40
    ordered = raw.long().masked_fill(raw < 0, last).sort(dim=1).values
    return ordered.masked_fill(ordered == last, -1)


def _workspace(of: Scores, select: Kernel) -> dict[str, torch.Tensor]:
    slots = -(-of.k // 4) * 4
    stride = max(-(-select.plan.constant("kElements") // 4) * 4, of.parts * slots)
    sizes = (1 << select.plan.constant("kDigitBits"), 2, stride)
    return {name: torch.zeros(ROWS, size, dtype=torch.int32) for name, size in zip(WORKSPACE, sizes, strict=True)}


def _share_rows(of: Scores, workspace: dict[str, torch.Tensor], memory: Memory) -> dict[str, int]:
    addresses = {name: memory.add(name, tensor, initialised=name != "lists") for name, tensor in workspace.items()}
    return {"parts": of.parts, "part_slots": -(-of.k // 4) * 4, "list_stride": workspace["lists"].shape[1], **addresses}
