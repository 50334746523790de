"""What choice tables and the launches' knob make of calls: kernels, splits, and splits that are clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_driver import H200, FakeDriver, fake_cubins, unpack

from dsagen.build.bundle import Bundle
from dsagen.check.cases import DecodeCase
from dsagen.check.probes import CaseRun
from dsagen.check.run import KernelCache, run_case
from dsagen.errors import GuardError, TableError
from dsagen.families.sparse_decode.choice_table import ChoiceRow
from dsagen.families.sparse_decode.family import with_all_bodies
from dsagen.matrix import Matrix, expand
from dsagen.render import render
from dsagen.runtime.api import Kernels
from dsagen.runtime.bundled import BundledCode
from dsagen.runtime.sparse_decode import DecodeTensors
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

SPEC = load_spec("v32_h16")
SHAPE = (2, 3, 200)
PAGES, PAGE = 5, 61


def all_bodies(matrix):
    return Matrix(matrix.spec_name, with_all_bodies(matrix.cells))


HOPPER, PORTABLE = (p for p in all_bodies(expand(SPEC)).plans() if p.variant.kernel == "main")
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


# The same region with the other body.
OTHER = replace(ROW, kernel=PORTABLE.slug, text=render(PORTABLE).evidence_hash, num_splits=3, launches=2)


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
        assert (record.symbol, record.config.grid, record.config.cluster) == (HOPPER.symbol, 6 * 4, 4)
        assert record.config.overlaps_previous
        block = unpack(record.block, HOPPER)
        assert (block["lse_accum"], block["o_accum"], block["num_splits"]) == (0, 0, 4)
    assert plan.workspace is None and kernels.sparse_decode_workspace_bytes(*SHAPE) == 0
    assert f"chosen: {HOPPER.slug}" in kernels.explain(batch=2, s_q=3, topk=200)


def test_a_check_tells_what_it_launched(table):
    """So that a kernel is no evidence for another of the same op, nor for a combine that did not run."""
    driver = FakeDriver()

    def load(spec, device):
        return Kernels(spec, open_driver=lambda: driver, read=fake_cubins)

    table.write_text(ROW.to_line() + replace(OTHER, tokens=(27, 27), num_splits=1, launches=1).to_line())
    found = {}
    for batch, splits in ((2, None), (2, 2), (9, 1)):
        case = DecodeCase("told", batch=batch, s_q=3, kv_tokens=500, topk=200, page_size=61, num_splits=splits)
        result, _ = run_case(CaseRun(case, KernelCache(SPEC, torch.device("cpu"), load), torch.device("cpu"), 1))
        assert result.status == "failed"  # nothing runs on this device
        found[batch, splits] = [slug.split("-")[1:3] for slug in result.slugs]
    assert found[2, None] == [["main", "hopper"]]
    assert found[2, 2] == [["combine", "portable"], ["main", "hopper"]]
    assert found[9, 1] == [["main", "mma_sync"]]


def test_a_row_may_choose_the_portable_body(table):
    table.write_text(OTHER.to_line())
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(*SHAPE)
    assert (plan.main_slug, plan.num_splits, plan.launches) == (PORTABLE.slug, 3, 2)
    kernels.sparse_decode(*inputs(), plan=plan)
    assert driver.launches[0].symbol == PORTABLE.symbol
    assert kernels.plan_sparse_decode(3, 3, 200).main_slug == HOPPER.slug


def test_without_a_table_the_preferred_body_is_taken(monkeypatch):
    """As on a device of that architecture that nobody has measured."""
    driver, kernels = make()
    kernels.prepare()
    assert sorted(driver.loads) == sorted([HOPPER.symbol, kernels._on(0).combine.symbol])
    assert kernels.plan_sparse_decode(*SHAPE).main_slug == HOPPER.slug
    text = kernels.explain(batch=2, s_q=3, topk=200)
    assert f"chosen: {HOPPER.slug}" in text and PORTABLE.slug not in text
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "mma_sync")
    assert make()[1].plan_sparse_decode(*SHAPE).main_slug == PORTABLE.slug


def test_shapes_that_no_row_covers_stay_as_they_were(table):
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(3, 3, 200)
    assert (plan.main_slug, plan.num_splits) == (HOPPER.slug, 1)
    kernels.sparse_decode(*inputs(batch=3), plan=plan)
    assert all(record.config.cluster == 1 for record in driver.launches)
    assert "untuned: no row of a choice table covers it" in kernels.explain(batch=3, s_q=3, topk=200)


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
    plan = kernels.plan_sparse_decode(*SHAPE)
    assert (plan.main_slug, plan.num_splits) == (HOPPER.slug, 1)
    assert f"choice table: not taken: {table}:1: {reason}" in kernels.explain(batch=2, s_q=3, topk=200)


def test_a_malformed_table_is_an_error_of_the_load(table):
    table.write_text("{}")
    with pytest.raises(TableError, match=f"{table}:1: field kernel: missing"):
        make()


def test_the_launches_knob_overrides_a_row(table, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", "2")
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(*SHAPE)
    assert (plan.main_slug, plan.num_splits, plan.launches) == (HOPPER.slug, 4, 2)
    kernels.sparse_decode(*inputs(), plan=plan)
    first, second = driver.launches
    assert unpack(first.block, HOPPER)["lse_accum"] == plan.workspace.data_ptr() and first.config.cluster == 1
    assert second.config.overlaps_previous


def test_a_device_that_holds_no_cluster_names_the_way_out(table):
    driver = FakeDriver(clusters=0)
    kernels = Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins)
    with pytest.raises(GuardError, match=r"SD-30.*a cluster of 4 CTAs: set DSAGEN_SPARSE_DECODE_LAUNCHES=2"):
        kernels.plan_sparse_decode(*SHAPE)


def test_the_cost_model_does_without_a_cluster_where_none_fits(monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    for clusters, launches in ((1, 1), (0, 2)):
        driver = FakeDriver(clusters=clusters)
        kernels = Kernels(SPEC, open_driver=lambda driver=driver: driver, read=fake_cubins)
        plan = kernels.plan_sparse_decode(64, 1, 2048)
        assert (plan.num_splits, plan.launches) == (2, launches)
        assert (kernels.sparse_decode_workspace_bytes(64, 1, 2048) > 0) == (launches == 2)
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", "1")
    with pytest.raises(GuardError, match=r"SD-30.*a cluster of 2 CTAs"):
        Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins).plan_sparse_decode(64, 1, 2048)


def test_a_plan_for_no_tokens_needs_no_room_for_clusters(table, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", "1")
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    driver = FakeDriver(clusters=0)  # what a grid of none is told
    kernels = Kernels(SPEC, open_driver=lambda: driver, read=fake_cubins)
    plan = kernels.plan_sparse_decode(0, 1, 200, num_splits=4)
    assert (plan.main_slug, plan.launches, plan.partition.cluster) == (HOPPER.slug, 1, 4)
    out, lse = kernels.sparse_decode(*inputs(0, 1), plan=plan)
    assert (out.shape[0], lse.shape[0], driver.launches) == (0, 0, [])
    with pytest.raises(GuardError, match="SD-30"):
        kernels.plan_sparse_decode(1, 1, 200, num_splits=4)


def test_a_graph_s_own_plan_is_a_cluster_too(table):
    driver, kernels = make()
    kernels.prepare()
    driver.capturing = True
    kernels.decode_with_shared_plan(DecodeTensors(*inputs()), None, may_plan_in_capture=True)
    assert [record.config.cluster for record in driver.launches] == [4]


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
    packed = [plan for plan in expand(SPEC).plans() if plan.slug != PORTABLE.slug]
    code = BundledCode(Bundle.__new__(Bundle), {plan.slug: None for plan in packed})
    table.write_text(OTHER.to_line())
    matrix = expand(SPEC)
    assert PORTABLE.slug in {cell.variant.slug for cell in matrix.cells}
    assert [cell.variant.slug for cell in code.without_absent(matrix).cells] == [plan.slug for plan in packed]
    # What is missing altogether stays, for the bundle to say so.
    assert BundledCode(Bundle.__new__(Bundle), {}).without_absent(matrix) == matrix
