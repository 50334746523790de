"""What choice tables and the launches' knob make of calls: kernels, splits, cooperative launches and their counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_driver import H200, FakeDriver, fake_cubins, unpack

from dsagen.build.bundle import Bundle
from dsagen.check.cases import DecodeCase
from dsagen.check.probes import CaseRun
from dsagen.check.run import KernelCache, run_case
from dsagen.errors import DeviceError, TableError
from dsagen.families.sparse_decode.choice_table import ChoiceRow
from dsagen.families.sparse_decode.family import with_all_bodies
from dsagen.matrix import Matrix, expand
from dsagen.render import render
from dsagen.runtime.api import Kernels
from dsagen.runtime.bundled import BundledCode
from dsagen.runtime.driver import DriverError
from dsagen.runtime.launch import failure_text, launch_config
from dsagen.runtime.sparse_decode import DecodeTensors
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

SPEC = load_spec("v32_h16")
SHAPE = (2, 3, 200)
PAGES, PAGE = 5, 61


def all_bodies(matrix):
    return Matrix(matrix.spec_name, with_all_bodies(matrix.cells))


HOPPER = next(p for p in all_bodies(expand(SPEC)).plans() if p.variant.body == "hopper")
ROW = ChoiceRow(
    HOPPER.slug, render(HOPPER).evidence_hash, H200.name, "580", "nvcc 13", "2026-12-01T10:00:00Z", 16,
    (5, 8), (200, 200), (0, 0), 4, 1, 6.5,
)  # fmt: skip


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "table.jsonl"
    path.write_text(ROW.to_line())
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", str(path))
    for name in ("DSAGEN_SPARSE_DECODE_BODY", "DSAGEN_SPARSE_DECODE_LAUNCHES", "DSAGEN_POISON_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    return path


def make():
    driver = FakeDriver()
    return driver, Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins)


def inputs(batch=2, s_q=3, topk=200):
    q = torch.randn(batch, s_q, 16, 576).bfloat16()
    k_cache = torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8)
    return q, k_cache, torch.zeros(batch, s_q, topk, dtype=torch.int32)


def test_a_row_decides_kernel_splits_and_launches(table):
    driver, kernels = make()
    kernels.prepare()
    plan = kernels.plan_sparse_decode(*SHAPE)
    assert (plan.main_slug, plan.num_splits, plan.launches) == (HOPPER.slug, 4, 1)
    tensors = inputs()
    for _ in range(3):
        kernels.sparse_decode(*tensors, plan=plan)
    assert len(driver.launches) == 3
    for record in driver.launches:
        assert (record.symbol, record.config.grid, record.config.cooperative) == (HOPPER.symbol, 6 * 4, True)
        block = unpack(record.block, HOPPER)
        assert block["arrivals"] == plan._counters.data_ptr()
        assert block["lse_accum"] == plan.workspace.data_ptr()
    assert plan._counters.numel() == 6 * 8 and not plan._counters.any()
    assert any(kept is plan._counters for kept in driver.kept)
    assert f"chosen: {HOPPER.slug}" in kernels.explain(batch=2, s_q=3, topk=200)


def test_a_check_tells_what_it_launched(table):
    """So that a kernel is no evidence for another of the same op, nor for a combine that did not run."""
    driver = FakeDriver()

    def load(spec, device):
        return Kernels(spec, open_driver=lambda: driver, read=fake_cubins)

    found = {}
    for batch, splits in ((2, None), (2, 2), (9, 1)):
        case = DecodeCase("told", batch=batch, s_q=3, kv_tokens=500, topk=200, page_size=61, num_splits=splits)
        result, _ = run_case(CaseRun(case, KernelCache(SPEC, torch.device("cpu"), load), torch.device("cpu"), 1))
        assert result.status == "failed"  # nothing runs on this device
        found[batch, splits] = [slug.split("-")[1:3] for slug in result.slugs]
    assert found[2, None] == [["main", "hopper"]]
    assert found[2, 2] == [["combine", "portable"], ["main", "hopper"]]
    assert found[9, 1] == [["main", "mma_sync"]]


def test_shapes_that_no_row_covers_stay_as_they_were(table):
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(3, 3, 200)
    assert "-mma_sync-" in plan.main_slug
    kernels.sparse_decode(*inputs(batch=3), plan=plan)
    assert not any(record.config.cooperative for record in driver.launches)
    assert "untuned: no measured table for this device" in kernels.explain(batch=3, s_q=3, topk=200)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "fake H100"}, "measured on fake H100, this is fake H200"),
        ({"text": "older"}, "measured with another text of"),
    ],
)
def test_foreign_and_stale_rows_are_told_by_explain(table, change, reason):
    table.write_text(replace(ROW, **change).to_line())
    _, kernels = make()
    assert "-mma_sync-" in kernels.plan_sparse_decode(*SHAPE).main_slug
    assert f"choice table: not taken: {table}:1: {reason}" in kernels.explain(batch=2, s_q=3, topk=200)


def test_a_malformed_table_is_an_error_of_the_load(table):
    table.write_text("{}")
    with pytest.raises(TableError, match=f"{table}:1: field kernel: missing"):
        make()


def test_the_launches_knob_overrides_a_row(table, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", "2")
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(*SHAPE)
    assert (plan.main_slug, plan.num_splits, plan.launches, plan._counters) == (HOPPER.slug, 4, 2, None)
    kernels.sparse_decode(*inputs(), plan=plan)
    first, second = driver.launches
    assert unpack(first.block, HOPPER)["arrivals"] == 0 and not first.config.cooperative
    assert second.config.overlaps_previous


def test_lent_memory_holds_no_counters(table):
    _, kernels = make()
    size = kernels.sparse_decode_workspace_bytes(*SHAPE)
    lent = torch.empty(size + 256, dtype=torch.uint8)
    lent = lent[-lent.data_ptr() % 256 :][:size].fill_(7)
    plan = kernels.plan_sparse_decode(*SHAPE, workspace=lent)
    assert (plan.launches, bool((lent == 7).all())) == (1, True)
    first, last = lent.data_ptr(), lent.data_ptr() + lent.numel()
    assert not first <= plan._counters.data_ptr() < last


def test_poison_does_not_reach_the_counters(table, monkeypatch):
    monkeypatch.setenv("DSAGEN_POISON_WORKSPACE", "1")
    _, kernels = make()
    plan = kernels.plan_sparse_decode(*SHAPE)
    kernels.sparse_decode(*inputs(), plan=plan)
    assert bool((plan.workspace == 255).all()) and not plan._counters.any()


def test_counters_are_cleared_after_a_call_that_ended_midway(table, monkeypatch):
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(*SHAPE)
    monkeypatch.setattr(plan._launches, "launch", lambda *_: (_ for _ in ()).throw(DeviceError("midway")))
    plan._counters.fill_(3)
    with pytest.raises(DeviceError, match="midway"):
        kernels.sparse_decode(*inputs(), plan=plan)
    monkeypatch.undo()
    kernels.sparse_decode(*inputs(), plan=plan)
    assert not plan._counters.any() and len(driver.launches) == 1


def test_a_grid_that_the_process_may_not_hold_names_the_way_out(table):
    driver = FakeDriver()
    kernels = Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins)
    plan = kernels.plan_sparse_decode(*SHAPE)
    error = DriverError("cuLaunchKernelEx", "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks")
    step = plan._steps[0]
    text = failure_text("sparse_decode", step.kernel, launch_config(step, 0), {}, error, debug_sync=False)
    assert text.endswith("set DSAGEN_SPARSE_DECODE_LAUNCHES=2") and "cooperative=True" in text


def test_a_graph_s_own_plan_takes_two_launches(table):
    """Its memory may be used again by what comes later in the graph."""
    driver, kernels = make()
    kernels.prepare()
    driver.capturing = True
    kernels.decode_with_shared_plan(DecodeTensors(*inputs()), None, may_plan_in_capture=True)
    assert [record.config.cooperative for record in driver.launches] == [False, False]
    assert driver.launches[0].symbol == HOPPER.symbol


def test_a_choice_is_planned_whatever_tables_say(table):
    driver = FakeDriver()
    kernels = Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins, select=all_bodies)
    shape = kernels._shape(2, 3, 200, 0)
    for main in kernels._on(0).mains:
        plan = kernels.plan_choice(shape, main.slug, 3, 2)
        assert (plan.main_slug, plan.num_splits, plan.launches) == (main.slug, 3, 2)
    assert kernels.plan_choice(shape, HOPPER.slug, 4, 1).launches == 1


def test_a_bundle_without_a_kernel_that_a_table_names_loads(table):
    """It was packed where no table named that kernel."""
    portable = [plan for plan in expand(SPEC).plans() if plan.slug != HOPPER.slug]
    code = BundledCode(Bundle.__new__(Bundle), {plan.slug: None for plan in portable})
    matrix = expand(SPEC)
    assert HOPPER.slug in {cell.variant.slug for cell in matrix.cells}
    assert [cell.variant.slug for cell in code.without_absent(matrix).cells] == [plan.slug for plan in portable]
    # What is missing altogether stays, for the bundle to say so.
    assert BundledCode(Bundle.__new__(Bundle), {}).without_absent(matrix) == matrix
