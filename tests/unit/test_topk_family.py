"""The top-k family: its cells, its plans, and what makes a geometry."""

from __future__ import annotations

import pytest

from dsagen.arch import ARCHS
from dsagen.errors import GuardError
from dsagen.families.topk.family import FAMILY
from dsagen.families.topk.geometry import (
    CANDIDATES,
    SCORE_TYPES,
    Geometry,
    keeps_candidates,
    preferred_candidates,
    smem_fields,
)
from dsagen.family import family_of_op
from dsagen.matrix import expand
from dsagen.plan import Variant
from dsagen.render import render
from dsagen.spec import load_spec

SPEC = {"model": "v32", "heads": 16, "archs": list(ARCHS), "ops": ["topk"]}


def variant(score: str = "fp32", arch: str = "sm_90a") -> Variant:
    return Variant(NAME, "main", BODY, arch, (("score", score), ("cand", preferred_candidates(score))))


@pytest.mark.parametrize("score", SCORE_TYPES)
def test_one_kernel_for_each_arch(score: str) -> None:
    matrix = expand(load_spec({**SPEC, "scores": score}))
    matrix.require_complete()
    assert [cell.variant for cell in matrix.cells] == [variant(score, arch) for arch in ARCHS]
    assert all(plan.smem_bytes <= 48 * 1024 for plan in matrix.plans())


def test_a_spec_may_have_both_ops_and_their_kernels_stay_apart() -> None:
    matrix = expand(load_spec({**SPEC, "ops": ["topk", "sparse_decode"], "archs": ["sm_90a"]}))
    assert [(cell.op, cell.role) for cell in matrix.cells] == [
        ("topk", "main"),
        ("sparse_decode", "main"),
        ("sparse_decode", "combine"),
    ]
    assert family_of_op("topk") is FAMILY


def test_heads_and_capacity_need_no_kernel_of_their_own() -> None:
    plans = {expand(load_spec({**SPEC, "heads": h, "topk": k})).plans() for h in (8, 128) for k in (1, 4096)}
    assert len(plans) == 1


def test_keys_are_kept_only_where_a_third_digit_needs_them() -> None:
    assert (preferred_candidates("fp32"), preferred_candidates("bf16")) == (CANDIDATES, 0)
    assert keeps_candidates(32, 11) and keeps_candidates(16, 7)
    assert not keeps_candidates(16, 8) and not keeps_candidates(16, 11)
    names = {score: [field.name for field in smem_fields(Geometry(score))[0]] for score in SCORE_TYPES}
    assert names["bf16"] == ["histogram", "warp_sums", "found"]
    assert names["fp32"] == [*names["bf16"], "kept", "candidates"]


@pytest.mark.parametrize(
    ("geometry", "guard_id"),
    [
        (Geometry("fp32", candidates=60000), "K-01"),
        (Geometry("fp32", threads=2048), "K-02"),
        (Geometry("fp32", threads=48), "TK-01"),
        (Geometry("fp32", digit_bits=13), "TK-02"),
    ],
)
def test_a_plan_that_breaks_a_limit_is_refused_with_the_slug(geometry: Geometry, guard_id: str) -> None:
    with pytest.raises(GuardError) as raised:
        plan_select(variant(), geometry)
    assert str(raised.value).startswith(f"[{guard_id}] ")
    assert str(raised.value).endswith(f" ({variant().slug})")


@pytest.mark.parametrize("score", SCORE_TYPES)
def test_every_plan_guard_is_asserted_in_the_unit(score: str) -> None:
    plan = FAMILY.plan(variant(score))
    text = render(plan).text
    assert [guard.guard_id for guard in plan.guards] == [g.guard_id for g in FAMILY.guards if g.when == "plan"]
    for guard in plan.guards:
        assert f'static_assert({guard.c_expression}, "[{guard.guard_id}] {guard.expression}");' in text
