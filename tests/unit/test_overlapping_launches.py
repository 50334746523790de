"""Kernels that start before their predecessor ends are planned only where the arch has such launches."""

from __future__ import annotations

import pytest

from dsagen.arch import ARCHS, WGMMA
from dsagen.dependent import alone, has_chain, is_dependent
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import DeploymentSpec, load_spec, shipped_specs

CHAIN = load_spec("v32_decode_h16")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_no_kernel_overlaps_its_predecessor_where_the_arch_cannot(arch):
    plans = [plan for name in shipped_specs() for plan in expand(load_spec(name).replace(archs=[arch.name])).plans()]
    assert plans
    assert {plan.overlaps_previous for plan in plans} == ({True, False} if arch.has_pdl else {False})


def plans_of(spec: DeploymentSpec) -> dict[str, KernelPlan]:
    return {plan.slug: plan for plan in expand(spec).plans()}


@pytest.mark.parametrize("body", ["", "mma_sync"])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_steps_have_dependent_forms_where_the_arch_has_such_launches(arch, body, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
    plans = plans_of(CHAIN.replace(archs=[arch.name]))
    dependent = [plan for plan in plans.values() if is_dependent(plan.variant)]
    kinds = [(p.variant.family, p.variant.kernel, p.variant.body) for p in dependent]
    few_rows = [("topk", "main", "row_resident"), ("topk", "count", "row_split"), ("topk", "main", "row_cluster")]
    # The hopper body begins early by itself.
    attention = [("sparse_decode", "main", "mma_sync")] if body or arch.mma_class != WGMMA else []
    assert kinds == ([*few_rows, *attention] if arch.has_pdl else [])
    for plan in dependent:
        own = plans[alone(plan.variant).slug]
        assert plan.overlaps_previous and not own.overlaps_previous
        # The text of the kernel by itself, but for names, with what waits ahead of its body.
        kept = [line for line in render(own).text.splitlines() if own.slug not in line and own.symbol not in line]
        behind = iter(render(plan).text.replace("BodyAlone =", "Body =").splitlines())
        assert all(line in behind for line in kept)
        assert "struct AfterGrid" in render(plan).text and "struct AfterGrid" not in render(own).text


def test_only_specs_with_all_stages_have_them():
    sm_90a = ARCHS["sm_90a"]
    chains = {"v32_decode_h16", "v32_decode_histogram_h16", "v4_decode_h16", "v41_decode_h16"}
    assert {name for name in shipped_specs() if has_chain(load_spec(name), sm_90a)} == chains
    without_pages = CHAIN.replace(index={"heads": 64, "dim": 128, "keys": "fp8", "forms": ["ragged"]})
    for spec in (without_pages, CHAIN.only("topk"), CHAIN.only("topk", "sparse_decode")):
        assert not any(is_dependent(plan.variant) for plan in plans_of(spec).values())
