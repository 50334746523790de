"""The hopper body over keys in one piece: what its plans hold, and what calls of it take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsagen.arch import arch
from dsagen.check.ragged_cases import RaggedCase
from dsagen.check.run import cases_of
from dsagen.errors import GuardError
from dsagen.families.indexer_logits import hopper_ragged
from dsagen.families.indexer_logits.geometry import DIMS
from dsagen.families.indexer_logits.guards import HOPPER_RAGGED_PLAN_GUARDS
from dsagen.families.indexer_logits.hopper_ragged import plan_hopper_ragged, preferred_geometry, smem_fields
from dsagen.families.indexer_logits.op import RaggedShape, explain_ragged_call, ragged_floor_seconds, ragged_partition
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import DeploymentSpec, load_spec

HOPPER = arch("sm_90a")


def spec_of(heads: int = 64, accumulation: str = "fast") -> DeploymentSpec:
    index = {"heads": heads, "forms": ["ragged"], "accumulation": accumulation}
    return load_spec({"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": index})


def plan_of(heads: int = 64) -> KernelPlan:
    (plan,) = expand(spec_of(heads)).plans()
    return plan


def test_heads_are_an_axis() -> None:
    assert plan_of().slug == "indexer_logits-ragged-hopper-sm_90a-keys.fp8-dim.128-heads.64-score.fp32-smem.227"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", range(8, 129, 8))
def test_every_plan_fits_an_sm(heads: int, dim: int) -> None:
    g = preferred_geometry(dim, heads)
    fields, size = smem_fields(g)
    assert size <= HOPPER.smem_optin_bytes and g.threads * hopper_ragged.REGISTERS <= HOPPER.registers_per_sm
    places = {field.name: field.offset_bytes for field in fields}
    # Operands begin where the swizzle counts from, the rows of each group, too.
    assert places["query"] == 0 and places["keys"] % 1024 == 0 and g.columns % 8 == 0
    assert (places["landed"] % 8, places["windows"] % 16) == (0, 0)
    assert 72 <= g.columns <= 128 and g.columns == g.queries * heads
    # What a launch lets a unit have is what the groups have tokens.
    assert g.query_rows // heads == g.groups * g.queries


def test_a_block_is_resident() -> None:
    assert resident_ctas(plan_of(128)) == plan_of(128).min_blocks_per_sm == 1


@pytest.mark.parametrize(
    ("heads", "shape", "expected"),
    [
        (64, RaggedShape(4096, 32768, 64), (8, 512, 131072, 132)),
        (32, RaggedShape(4096, 32768, 32), (16, 256, 65536, 132)),
        (40, RaggedShape(13, 300, 40), (12, 2, 6, 6)),
        (8, RaggedShape(3, 100, 8), (3, 1, 1, 1)),
    ],
)
def test_partitions(heads: int, shape: RaggedShape, expected: tuple[int, ...]) -> None:
    part = ragged_partition(plan_of(heads), shape, 132)
    assert (part.unit_tokens, part.unit_count, part.tiles, part.blocks) == expected


def test_the_unit_has_the_guards() -> None:
    text = render(plan_of()).text
    assert all(f"[{guard.guard_id}]" in text for guard in HOPPER_RAGGED_PLAN_GUARDS)


@pytest.mark.parametrize(
    ("change", "guard_id"),
    [
        ({"stages": 10}, "K-01"),
        ({"groups": 6}, "K-02"),
        ({"dim": 96}, "IL-02"),
        ({"heads": 136, "queries": 1}, "IL-40"),
        ({"queries": 1}, "IL-43"),
        ({"ahead": 5}, "IL-44"),
        ({"ahead": 0}, "IL-44"),
        ({"groups": 3}, "IL-45"),
    ],
)
def test_a_plan_that_is_refused_says_so(change: dict[str, int], guard_id: str) -> None:
    g = replace(preferred_geometry(128, 64), **change)
    with pytest.raises(GuardError, match=rf"^\[{guard_id}\] .* \(indexer_logits-ragged-hopper-"):
        plan_hopper_ragged(plan_of().variant, g)


def test_the_floor_has_products_of_codes_at_their_own_rate() -> None:
    (figures,) = HOPPER.figures
    flops = 2 * 4096 * 32768 * 64 * 128
    expected = flops / figures.e4m3_flops_per_second
    shape = RaggedShape(4096, 32768, 64)
    assert ragged_floor_seconds(plan_of(), shape, HOPPER) == pytest.approx(expected)
    text = explain_ragged_call(plan_of(), shape, 132, HOPPER)
    assert "units: 512, 8 neighbouring tokens share a pass over their keys\n" in text
    assert "grid: 132 CTAs share up to 131072 tiles of 128 keys\n" in text


def test_the_check_allows_short_sums_where_they_are() -> None:
    def declared(accumulation: str) -> set[bool]:
        cases = cases_of(spec_of(accumulation=accumulation), "sm_90a", "quick")
        return {case.short_sums for case in cases if isinstance(case, RaggedCase)}

    assert (declared("fp32"), declared("fast")) == ({False}, {True})
