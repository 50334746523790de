"""Measuring the caches' writers and readers; inputs, and the comparison of every byte of a pool, are the check's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsagen
from dsagen.arch import arch_for_capability
from dsagen.bench.cache_figures import CacheBenchCase, CacheFigures
from dsagen.bench.figures import CaseKey, case_key, figures_of
from dsagen.bench.timing import Call, eager_cost_us, graph_time_us, input_sets_for
from dsagen.check.cache_inputs import copy_of
from dsagen.check.index_cases import Action as IndexAction
from dsagen.check.index_cases import IndexCacheCase
from dsagen.check.index_run import IndexCacheRun
from dsagen.check.kv_cases import Action, KvCase
from dsagen.check.kv_run import KvRun, copies_of
from dsagen.check.probes import WrongResultError
from dsagen.errors import CheckFailed
from dsagen.families.index_cache.op import key_traffic_bytes
from dsagen.families.kv_cache.op import row_traffic_bytes
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.spec import DeploymentSpec

# A decode step's, a prompt's, and what fills the device.
ROWS = (128, 4096, 65536)
KV, INDEX = KvCase.op, IndexCacheCase.op
MOST_SETS = 24
# Requests that the rows of a gather are of.
_REQUESTS = 8
_EXTRA = "_extra"


def cache_cases(spec: DeploymentSpec, op: str) -> list[CacheBenchCase]:
    """Each kernel of one of both ops at each number of rows."""
    cells = [cell for cell in expand(spec).cells if cell.op == op and cell.arch == spec.archs[0]]
    cases = []
    for cell in cells:
        extra = cell.role.endswith(_EXTRA)
        record = spec.extra_kv_format if extra else spec.kv_format
        assert record is not None and (op == KV or spec.index is not None)
        name = record.format_id if op == KV or spec.index is None else spec.index.keys
        cases += [CacheBenchCase(op, cell.role.removesuffix(_EXTRA), name, rows, extra=extra) for rows in ROWS]
    return cases


def sweep_caches(
    spec: DeploymentSpec,
    op: str,
    *,
    seed: int,
    records: Mapping[CaseKey, float],
    progress: Callable[[str], None],
    wrong: Callable[[str], None],
) -> list[CacheFigures]:
    """Every case of one of both ops on the current device. What is wrong with a call goes to `wrong`."""
    kernels = dsagen.load(spec)
    kernels.prepare()
    figures: list[CacheFigures] = []
    for case in cache_cases(spec, op):
        try:
            found = measure_cache(kernels, case, seed)
        except CheckFailed as error:
            wrong(str(error))
            continue
        progress(f"{spec.name}: {found.title}: {found.gpu_us:.1f} us")
        figures.append(replace(found, record_us=records.get(case_key(case.to_json()))))
    return figures


def measure_cache(kernels: Any, case: CacheBenchCase, seed: int) -> CacheFigures:
    """Verify the call of the first input set, then time all. CheckFailed for a wrong one."""
    properties = torch.cuda.get_device_properties(kernels.device)
    arch = arch_for_capability(properties.major, properties.minor)
    plan = _plan_of(kernels.spec, case, arch.name)
    moved = case.rows * (row_traffic_bytes(plan) if case.op == KV else key_traffic_bytes(plan))
    run = _run_of(kernels, case, seed)
    inputs = [_inputs(run, kernels.spec, number) for number in range(input_sets_for(moved, most=MOST_SETS))]
    try:
        _verify(run, kernels, inputs[0])
    except WrongResultError as error:
        raise CheckFailed(f"{kernels.spec.name}: {case}: {error}; it was not timed") from None
    calls: list[Call] = [partial(_call, run, kernels, item, _output(run, item)) for item in inputs]
    timing = graph_time_us(calls)
    issue_us, wall_us = eager_cost_us(calls)
    ceilings = figures_of(properties.name, arch)
    return CacheFigures(
        spec=kernels.spec.name,
        slugs=(plan.slug,),
        device=properties.name,
        arch=arch.name,
        case=case,
        gpu_us=timing.median_us,
        spread=timing.spread,
        input_sets=timing.sets,
        moved_bytes=moved,
        issue_us=issue_us,
        wall_us=wall_us,
        floor_us=None if ceilings is None else moved / ceilings.dram_read_bytes_per_second * 1e6,
    )


def _plan_of(spec: DeploymentSpec, case: CacheBenchCase, arch: str) -> KernelPlan:
    role = case.action + (_EXTRA if case.extra else "")
    slugs = {cell.variant.slug for cell in expand(spec, (arch,)).cells if cell.op == case.op and cell.role == role
             if cell.variant is not None}  # fmt: skip
    return next(plan for plan in expand(spec, (arch,)).plans() if plan.slug in slugs)


def _run_of(kernels: Any, case: CacheBenchCase, seed: int) -> KvRun | IndexCacheRun:
    """The check's run of the case, over a pool of twice the rows."""
    pages = -(-2 * case.rows // case.page_size)
    sizes: dict[str, Any] = {"rows": case.rows, "pages": pages, "page_size": case.page_size}
    name, device = f"bench.{case.action}.{case.rows}", kernels.device
    if case.op == KV:
        return KvRun(KvCase(name, Action(case.action), case.extra, **sizes), lambda _: kernels, device, seed)
    return IndexCacheRun(IndexCacheCase(name, IndexAction(case.action), **sizes), lambda _: kernels, device, seed)


def _inputs(run: KvRun | IndexCacheRun, spec: DeploymentSpec, number: int) -> Any:
    """Inputs of the check in which every row has a slot of its own, and none is left out."""
    call: Any = run.make_call(spec, number)
    case, inputs = run.case, call.inputs
    generator = torch.Generator(run.device)
    generator.manual_seed(run.seed + number)
    tokens = case.pages * case.page_size
    for name in ("slots", "source_slots", "target_slots"):
        if name in inputs:
            order = torch.randperm(tokens, device=run.device, generator=generator)
            inputs[name] = order[: case.rows]
    if isinstance(run, IndexCacheRun) and case.action is IndexAction.GATHER:
        inputs |= _table(case.rows, case.pages, case.page_size, generator)
    return call


def _table(rows: int, pages: int, page_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Requests of equal length, whose pages are anywhere."""
    device, each = generator.device, -(-rows // _REQUESTS)
    columns = -(-each // page_size)
    order = torch.randperm(max(pages, columns), device=device, generator=generator)[:pages].int()
    table = torch.stack([order.roll(number * columns)[:columns] for number in range(_REQUESTS)])
    starts = torch.arange(_REQUESTS + 1, device=device).mul(each).clamp(max=rows).int()
    return {"block_table": table, "row_starts": starts, "token_starts": torch.zeros_like(starts[1:])}


def _output(run: KvRun | IndexCacheRun, item: Any) -> Tensor | None:
    """Rows of a read, which the check allocates in each call."""
    if not isinstance(run, KvRun) or run.case.action is not Action.READ:
        return None
    found = run.call(run.kernels(run.case), item)
    assert found is not None
    return found


def _call(run: KvRun | IndexCacheRun, kernels: Any, item: Any, output: Tensor | None) -> None:
    if isinstance(run, KvRun):
        run.call(kernels, item, output)
    else:
        run.call(kernels, item)


def _verify(run: KvRun | IndexCacheRun, kernels: Any, item: Any) -> None:
    if isinstance(run, KvRun):
        before = copies_of(item.caches)
        run.compare(kernels.spec, item, before, run.call(kernels, item))
        return
    cache = copy_of(item.cache)
    run.call(kernels, item)
    run.compare(kernels.spec, item, cache)
