"""What a call costs the host: microseconds of CPU to issue one, by op, by what is given to it, and by launcher.

Calls are issued back to back without a synchronisation, few enough that the device's queue never fills. All ways to
call an op take turns, round by round, so that what one adds to another is not the machine's drift. The floor is one
launch of the same kernel by cuda-python with everything prepared: the driver's own work, and nothing else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsagen.errors import SpecError
from dsagen.index_format import index_format
from dsagen.runtime.api import Kernels
from dsagen.runtime.driver import CudaDriver
from dsagen.runtime.index_cache import OP as INDEX_CACHE_OP
from dsagen.runtime.indexer import OP as LOGITS_OP
from dsagen.runtime.kv_cache import OP as CACHE_OP
from dsagen.runtime.sparse_decode import OP as DECODE_OP
from dsagen.runtime.topk import OP as TOPK_OP
from dsagen.spec import DeploymentSpec

LAUNCHERS = ("c", "python")
CALLS_PER_ROUND, ROUNDS = 200, 15
# Pages and tokens of the caches; nothing of a call's cost on the host depends on them.
PAGES, PAGE_SIZE = 64, 64
TOPK_ROWS, TOPK_WIDTH, TOPK_SLOTS = 4, 4096, 512
SPLIT_WIDTH = 256 << 10
CACHE_ROWS = 64
# What one eager call of sparse decode may cost on an H200's host, by what is given to it, and what the op of torch may
# add to the same call.
GOALS_US = {
    "main: plan, outputs given": 6.0,
    "main + combine: plan, outputs given": 10.0,
    "main: plan": 14.0,
    "main + combine: plan": 14.0,
}
OP_GOAL_US = 4.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class HostCost:
    """One way to call an op. `us` is the median round, `least_us` the best one; `launches` is kernels of a call."""

    spec: str
    op: str
    call: str
    launcher: str
    launches: int
    us: float
    least_us: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_host_costs(spec: DeploymentSpec, progress: Callable[[str], None] = lambda _: None) -> list[HostCost]:
    """The costs of every op of a spec with each launcher on the current device.

    Raises DeviceError without a device that the spec declares, ToolchainError or BuildError where the launcher in C
    cannot be compiled.
    """
    costs: list[HostCost] = []
    for launcher in LAUNCHERS:
        kernels = Kernels(spec, open_driver=partial(CudaDriver, launcher))
        kernels.prepare()
        costs += costs_of(kernels, launcher, torch.cuda.synchronize, progress)
    return costs


def costs_of(
    kernels: Kernels,
    launcher: str,
    synchronize: Callable[[], Any],
    progress: Callable[[str], None] = lambda _: None,
    calls: int = CALLS_PER_ROUND,
    rounds: int = ROUNDS,
) -> list[HostCost]:
    """The costs of some kernels' ops, on their device."""
    found = list(host_calls(kernels))
    progress(f"{kernels.spec.name}: {len(found)} ways to call {', '.join(kernels.spec.ops)} ({launcher})")
    measured = issue_costs_us([call for *_, call in found], synchronize, calls, rounds)
    return [
        HostCost(kernels.spec.name, op, name, launcher, launches, *us)
        for (op, name, launches, _), us in zip(found, measured, strict=True)
    ]


def issue_costs_us(
    ways: Sequence[Call],
    synchronize: Callable[[], Any],
    calls: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Median and least microseconds to issue a call, over rounds of calls; one pair for each way to call.

    `clock` gives seconds.
    """
    # Until clocks, caches and the interpreter have settled.
    for way in ways:
        for _ in range(calls):
            way()
        synchronize()
    measured: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, found in zip(ways, measured, strict=True):
            start = clock()
            for _ in range(calls):
                way()
            found.append((clock() - start) * 1e6 / calls)
            synchronize()
    return [(statistics.median(found), min(found)) for found in measured]


def host_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    """(op, what is given, launches, call) for every op of the spec."""
    ops = kernels.spec.ops
    if DECODE_OP in ops:
        yield from _decode_calls(kernels)
    if TOPK_OP in ops:
        yield from _topk_calls(kernels)
    if CACHE_OP in ops:
        yield from _cache_calls(kernels)
    if LOGITS_OP in ops:
        yield from _logits_calls(kernels)
    if INDEX_CACHE_OP in ops:
        yield from _index_cache_calls(kernels)


def _decode_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    spec, device = kernels.spec, kernels.device
    q, pool = torch.randn(1, 1, spec.heads, spec.dims.d_qk, device=device).bfloat16(), _pool(kernels)
    out = torch.empty(1, 1, spec.heads, spec.dims.d_v, device=device).bfloat16()
    outputs: dict[str, Any] = {"out": out, "lse": torch.empty(1, 1, spec.heads, device=device).transpose(1, 2)}
    for shape, launches, topk in (("main", 1, min(spec.topk, 64)), ("main + combine", 2, min(spec.topk, 512))):
        ids = torch.randint(0, PAGES * PAGE_SIZE, (1, 1, topk), device=device, dtype=torch.int32)
        for name, call in _calls_of_a_shape(kernels, (q, pool, ids), outputs, launches):
            yield DECODE_OP, f"{shape}: {name}", launches, call
    tensors = (q, pool, ids)
    chosen = kernels.plan_sparse_decode(1, 1, topk)
    yield DECODE_OP, "no plan", min(chosen.num_splits, 2), partial(kernels.sparse_decode, *tensors)
    plan = kernels.plan_sparse_decode(1, 1, topk, num_splits=1)
    kernels.sparse_decode(*tensors, plan=plan, **outputs)
    # The launcher in C keeps none: its floor is cuda-python's.
    for launch in plan.prepared_launches():
        yield DECODE_OP, "floor: the driver's launch alone", 1, partial(launch, (*tensors, *outputs.values()))


def _calls_of_a_shape(
    kernels: Kernels, tensors: tuple[Tensor, Tensor, Tensor], outputs: dict[str, Any], launches: int
) -> Iterator[tuple[str, Call]]:
    """The ways to make a call of one or two launches, by the plan and by the op of torch."""
    shape, op = (1, 1, tensors[2].shape[2]), torch.ops.dsagen
    # As many splits as calls without a plan have, where these make that many launches.
    chosen = kernels.plan_sparse_decode(*shape).num_splits
    splits = chosen if min(chosen, 2) == launches else launches
    plans = [kernels.plan_sparse_decode(*shape, num_splits=splits) for _ in range(2)]
    yield "plan, outputs given", partial(kernels.sparse_decode, *tensors, plan=plans[0], **outputs)
    yield "plan", partial(kernels.sparse_decode, *tensors, plan=plans[1])
    # By position, as compiled code calls; lengths, sink and scale are left out.
    given, options = (*tensors, kernels.handle), () if splits == chosen else (None, None, None, splits)
    yield "torch op", partial(op.sparse_decode, *given, *options)
    yield "torch op, outputs given", partial(op.sparse_decode_out, *given, *outputs.values(), *options)


def _topk_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    spec, device, op = kernels.spec, kernels.device, torch.ops.dsagen
    k = min(TOPK_SLOTS, spec.selected_topk)
    dtype = torch.bfloat16 if spec.scores == "bf16" else torch.float32
    for rows, width in ((TOPK_ROWS, TOPK_WIDTH), (1, SPLIT_WIDTH)):
        scores = torch.randn(rows, width, device=device).to(dtype)
        out = torch.empty(rows, k, device=device, dtype=torch.int32)
        shape, launches = f"{rows} x {width}", len(kernels.topk_slugs(scores, k=k))
        topk = partial(kernels.topk, scores, k=k)
        yield TOPK_OP, f"{shape}: out given", launches, partial(topk, out=out)
        plans = [kernels.plan_topk(rows, width, k) for _ in range(2)]
        yield TOPK_OP, f"{shape}: plan, out given", launches, partial(topk, plan=plans[0], out=out)
        yield TOPK_OP, f"{shape}: plan", launches, partial(topk, plan=plans[1])
        yield TOPK_OP, f"{shape}: torch op", launches, partial(op.topk, scores, kernels.handle, k)
        yield (
            TOPK_OP,
            f"{shape}: torch op, out given",
            launches,
            partial(op.topk_out, scores, kernels.handle, k, out),
        )


def _cache_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    spec, device, op, handle = kernels.spec, kernels.device, torch.ops.dsagen, kernels.handle
    rows = torch.randn(CACHE_ROWS, spec.kv_format.d_qk, device=device).bfloat16()
    slots = torch.randperm(PAGES * PAGE_SIZE, device=device)[:CACHE_ROWS].int()
    cache, out = _pool(kernels), torch.empty_like(rows)
    yield CACHE_OP, "write", 1, partial(kernels.kv_write, rows, cache, slots)
    yield CACHE_OP, "write: torch op", 1, partial(op.kv_write, rows, cache, slots, handle)
    yield CACHE_OP, "read: out given", 1, partial(kernels.kv_read, cache, slots=slots, out=out)
    yield CACHE_OP, "read", 1, partial(kernels.kv_read, cache, slots=slots)
    yield CACHE_OP, "read: torch op", 1, partial(op.kv_read, cache, handle, slots)


def _logits_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    spec, device = kernels.spec, kernels.device
    assert spec.index is not None
    heads, dim = spec.index.heads, spec.index.dim
    q = torch.zeros(1, 1, heads, dim, device=device, dtype=torch.uint8)
    pool = _index_pool(kernels)
    weights = torch.zeros(1, heads, device=device)
    lengths = torch.full((1,), PAGES * PAGE_SIZE, device=device, dtype=torch.int32)
    table = torch.arange(PAGES, device=device, dtype=torch.int32)[None]
    logits = partial(kernels.indexer_logits, q, pool, weights, lengths, table)
    width = PAGES * PAGE_SIZE
    dtype = torch.bfloat16 if spec.scores == "bf16" else torch.float32
    yield LOGITS_OP, "out given", 1, partial(logits, out=torch.empty(1, width, device=device, dtype=dtype))
    yield LOGITS_OP, "max_seq_len", 1, partial(logits, max_seq_len=width)
    op = torch.ops.dsagen.indexer_logits
    given = (q, pool, weights, lengths, table, kernels.handle)
    yield LOGITS_OP, "torch op", 1, partial(op, *given, None, width)


def _index_cache_calls(kernels: Kernels) -> Iterator[tuple[str, str, int, Call]]:
    spec, device, op, handle = kernels.spec, kernels.device, torch.ops.dsagen, kernels.handle
    assert spec.index is not None
    pool, keys = _index_pool(kernels), torch.randn(CACHE_ROWS, spec.index.dim, device=device).bfloat16()
    slots = torch.randperm(PAGES * PAGE_SIZE, device=device)[:CACHE_ROWS].int()
    table = torch.arange(PAGES, device=device, dtype=torch.int32)[None]
    starts = torch.tensor([0, CACHE_ROWS], device=device, dtype=torch.int32)
    yield INDEX_CACHE_OP, "write", 1, partial(kernels.index_write, keys, pool, slots)
    yield INDEX_CACHE_OP, "write: torch op", 1, partial(op.index_write, keys, pool, slots, handle)
    yield INDEX_CACHE_OP, "gather", 1, partial(kernels.index_gather, pool, table, starts, CACHE_ROWS)
    yield INDEX_CACHE_OP, "gather: torch op", 1, partial(op.index_gather, pool, handle, table, starts, CACHE_ROWS)


def _index_pool(kernels: Kernels) -> Tensor:
    index = kernels.spec.index
    assert index is not None, "a spec with the op has an index"
    record_bytes = index_format(index.keys).record_bytes(index.dim)
    return torch.zeros(PAGES, PAGE_SIZE, 1, record_bytes, device=kernels.device, dtype=torch.uint8)


def _pool(kernels: Kernels) -> Tensor:
    record = kernels.spec.kv_format
    if len(record.tensors) != 1:
        raise SpecError(
            f"{kernels.spec.name}: KV format {record.format_id} has caches of several tensors: leave it out"
        )
    tensor = record.cache_tensor()
    dtype = getattr(torch, tensor.dtypes[0])
    page = record.page_bytes(PAGE_SIZE) // dtype.itemsize
    memory = torch.zeros(PAGES * page, device=kernels.device, dtype=dtype)
    return memory.as_strided((PAGES, PAGE_SIZE, 1, tensor.columns), (page, tensor.columns, tensor.columns, 1))


def table_rows(costs: Sequence[HostCost]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a call a row, microseconds by launcher (the median, and the best round in brackets)."""
    launchers = list(dict.fromkeys(cost.launcher for cost in costs))
    cells: dict[tuple[str, str, str, int], dict[str, str]] = {}
    for cost in costs:
        row = cells.setdefault((cost.spec, cost.op, cost.call, cost.launches), {})
        row[cost.launcher] = f"{cost.us:.2f} ({cost.least_us:.2f})"
    header = ["spec", "op", "call", "launches", *(f"us, {launcher}" for launcher in launchers)]
    rows = [[*map(str, key), *(row.get(launcher, "-") for launcher in launchers)] for key, row in cells.items()]
    return header, rows


def goal_rows(costs: Sequence[HostCost]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what has a goal: medians of the launcher in C, and what the op of torch adds to a call."""
    rows = []
    for spec in dict.fromkeys(cost.spec for cost in costs):
        own = (cost for cost in costs if (cost.spec, cost.op, cost.launcher) == (spec, DECODE_OP, LAUNCHERS[0]))
        us = {cost.call: cost.us for cost in own}
        for call, goal in GOALS_US.items():
            through_op = call.replace("plan", "torch op")
            if call in us:
                rows.append([spec, call, f"{us[call]:.2f}", f"{goal:g}"])
            if call in us and through_op in us:
                rows.append([spec, f"{through_op}, more", f"{us[through_op] - us[call]:.2f}", f"{OP_GOAL_US:g}"])
    return ["spec", "call", "us", "goal on an H200"], rows
