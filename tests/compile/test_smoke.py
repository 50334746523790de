"""The smoke tier: what nvcc makes of the kernels. The build itself refuses spills and lost-performance messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsagen.arch import ARCHS
from dsagen.build import Store, Toolchain, build_units, find_toolchain
from dsagen.errors import BuildError
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import RenderedUnit, render
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile


def plans_of(spec_name: str, arch: str) -> tuple[KernelPlan, ...]:
    matrix = expand(load_spec(spec_name).replace(archs=[arch]))
    matrix.require_complete()
    return matrix.plans()


def compile_plans(plans: tuple[KernelPlan, ...], arch: str) -> None:
    units = [render(plan) for plan in plans]
    results = build_units(units, Store.open(), lambda: toolchain_for(arch))
    for plan, result in zip(plans, results, strict=True):
        report = result.entry.report
        assert report["registers"] <= plan.registers_cap
        assert (report["spill_store_bytes"], report["spill_load_bytes"], report["stack_bytes"]) == (0, 0, 0)
        assert report["smem_static_bytes"] == 0
        assert report["performance_messages"] == []


def toolchain_for(arch: str) -> Toolchain:
    return find_toolchain({arch: ARCHS[arch].min_cuda})


@pytest.mark.parametrize("spec_name", ["v32_h16", "v32_bf16_h128"])
def test_every_variant_on_hopper(spec_name: str) -> None:
    compile_plans(plans_of(spec_name, "sm_90a"), "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch(arch: str) -> None:
    compile_plans(plans_of("v32_h32", arch), arch)


@pytest.mark.parametrize(
    ("original", "changed", "guard_id"),
    [
        ("static constexpr int kStages = ", "static constexpr int kStages = 1 - 0 * ", "SD-01"),
        ("alignas(16) float query_factor", "alignas(16) float inserted[4]; alignas(16) float query_factor", "K-03"),
        ("  i32 s_q;", "  i32 inserted; i32 s_q;", "K-04"),
    ],
)
def test_a_unit_that_leaves_its_plan_does_not_compile(original: str, changed: str, guard_id: str) -> None:
    unit = render(plans_of("v32_h16", "sm_90a")[0])
    assert unit.text.count(original) == 1
    broken: RenderedUnit = replace(unit, text=unit.text.replace(original, changed))
    with pytest.raises(BuildError, match=rf"\[{guard_id}\]"):
        build_units([broken], Store.open(), lambda: toolchain_for("sm_90a"))
