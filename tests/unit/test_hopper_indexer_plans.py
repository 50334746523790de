"""The hopper body of the indexer's logits: what its plans hold, and what calls of it take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from dsagen.arch import arch
from dsagen.check.block_cases import BlockCase
from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.run import cases_of
from dsagen.check.step_cases import StepCase
from dsagen.cli.app import cli
from dsagen.errors import GuardError
from dsagen.families.indexer_logits import FAMILY, hopper
from dsagen.families.indexer_logits.geometry import DIMS
from dsagen.families.indexer_logits.guards import HOPPER_PLAN_GUARDS
from dsagen.families.indexer_logits.hopper import HopperGeometry, plan_hopper, preferred_geometry, smem_fields
from dsagen.families.indexer_logits.op import LogitsShape, floor_seconds, partition_of
from dsagen.index_format import index_format
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import load_spec

HOPPER = arch("sm_90a")
HEADS = range(8, 129, 8)


def plan_of(heads: int = 64, dim: int = 128, keys: str = "fp8") -> KernelPlan:
    index = {"heads": heads, "dim": dim, "keys": keys, "accumulation": "fast"}
    spec = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": index}
    (plan,) = expand(load_spec(spec)).plans()
    return plan


def test_heads_are_an_axis_and_tokens_are_none() -> None:
    assert plan_of().slug == "indexer_logits-main-hopper-sm_90a-keys.fp8-dim.128-heads.64-score.fp32-smem.227"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_plan_fits_three_blocks_on_an_sm(heads: int, dim: int) -> None:
    g = preferred_geometry(dim, heads, HOPPER)
    fields, size = smem_fields(g)
    assert 3 * (size + 1024) <= HOPPER.smem_per_sm_bytes
    assert 3 * 128 * hopper.REGISTERS <= 65536
    # 84 KB of keys under way keep memory busy; rows of few dims need what the ring may have.
    least = g.stages_for(g.most_tokens)
    assert 3 * 4 * least * 32 * (dim + 4) >= 84_000 or least == 8
    assert g.stages == g.stages_for(1) >= min(8, 3 * 128 // dim)
    places = {field.name: field.offset_bytes for field in fields}
    assert (places["operands"], places["landed"] % 8, places["weights"] % 16) == (0, 0, 0)
    assert (g.token_bytes % 1024, g.stage_bytes % 128) == (0, 0)
    # A product has at most 64 columns in steps of 8, and those of a token are its heads or one tile more.
    columns = g.rows // g.parts
    assert columns % 8 == 0 and columns <= 64 and heads <= g.rows < heads + 16 and columns * g.parts == g.rows
    assert g.rows == heads or heads > 64
    # What a launch lets a unit have is what the image has room for.
    tokens = min(8, g.query_rows // heads)
    assert tokens == g.most_tokens and tokens * g.rows <= g.query_rows
    assert tokens == 8 or (tokens + 1) * heads > 256


@pytest.mark.parametrize("keys", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_plan_of_scaled_blocks_fits_three_blocks_on_an_sm(heads: int, dim: int, keys: str) -> None:
    plan, g = plan_of(heads, dim, keys=keys), preferred_geometry(dim, heads, HOPPER, index_format(keys))
    assert 3 * (plan.smem_bytes + 1024) <= HOPPER.smem_per_sm_bytes
    # Operands of 16 bits: rows of 128 dims take two parts of the image, and products half the columns.
    assert g.image_parts == max(1, dim // 64) and g.row_bytes == dim // (2 if keys == "mxfp4" else 1)
    columns = g.rows // g.parts
    assert columns % 8 == 0 and columns <= 32 and heads <= g.rows < heads + 32 and columns * g.parts == g.rows
    # What a launch lets a unit have is what the image has room for.
    tokens = partition_of(plan, LogitsShape(1, 8, 4096, heads), 132).unit_tokens
    assert tokens == g.most_tokens and tokens * g.rows <= g.query_rows
    assert not hopper.sums_e4m3(plan) and hopper.sums_e4m3(plan_of(heads, dim))


def test_scores_of_candidate_blocks_are_a_part_of_the_same_body() -> None:
    main = plan_of()
    blocks = FAMILY.plan(replace(main.variant, kernel="blocks"))
    assert (blocks.constants, blocks.smem, blocks.threads) == (main.constants, main.smem, main.threads)
    assert (dict(main.parts), dict(blocks.parts)) == (
        {"counts": False, "epilogue": False}, {"counts": False, "epilogue": True}
    )  # fmt: skip
    assert {field.name for field in blocks.params} > {field.name for field in main.params}
    assert "Epilogue" in render(blocks).text and "Epilogue" not in render(main).text


def test_as_many_blocks_as_planned_are_resident() -> None:
    assert resident_ctas(plan_of(128)) == plan_of(128).min_blocks_per_sm == 3


@pytest.mark.parametrize(
    ("heads", "shape", "expected"),
    [
        (64, LogitsShape(1, 1, 4096, 64), (1, 1, 32, 128)),
        (64, LogitsShape(128, 1, 32768, 64), (1, 1, 32768, 396)),
        (64, LogitsShape(2, 8, 100, 64), (4, 2, 4, 16)),
        (8, LogitsShape(2, 8, 64, 8), (8, 1, 2, 4)),
        (120, LogitsShape(2, 5, 129, 120), (2, 3, 12, 30)),
    ],
)
def test_partitions(heads: int, shape: LogitsShape, expected: tuple[int, ...]) -> None:
    part = partition_of(plan_of(heads), shape, 132)
    assert (part.unit_tokens, part.unit_count, part.tiles, part.blocks) == expected


def test_shared_memory_begins_where_the_swizzle_counts_from() -> None:
    text = render(plan_of()).text
    assert "extern __shared__ __align__(1024) u8 dynamic_smem[];" in text
    assert all(f"[{guard.guard_id}]" in text for guard in HOPPER_PLAN_GUARDS)


@pytest.mark.parametrize(
    ("change", "guard_id"),
    [
        ({"shared_bytes": 300_000}, "K-01"),
        ({"per_sm": 4}, "K-02"),
        ({"dim": 96}, "IL-02"),
        ({"stages": 0}, "IL-04"),
        ({"heads": 136}, "IL-40"),
        ({"warps": 6, "per_sm": 1}, "IL-41"),
        ({"query_rows": 32}, "IL-42"),
        ({"shared_bytes": 49_151}, "IL-46"),
    ],
)
def test_a_plan_that_is_refused_says_so(change: dict[str, int], guard_id: str) -> None:
    g: HopperGeometry = replace(preferred_geometry(128, 64, HOPPER), **change)
    with pytest.raises(GuardError, match=rf"^\[{guard_id}\] .* \(indexer_logits-main-hopper-"):
        plan_hopper(plan_of().variant, g)


def test_q_of_few_tokens_leaves_room_for_more_stages() -> None:
    g = preferred_geometry(128, 64, HOPPER)
    assert [g.stages_for(tokens) for tokens in (1, 2, 3, 4)] == [3, 3, 2, 2]


def test_the_floor_has_products_of_codes_at_twice_the_rate() -> None:
    flops = 2 * 128 * 8 * 32768 * 64 * 128
    assert floor_seconds(plan_of(), LogitsShape(128, 8, 32768, 64), HOPPER) == pytest.approx(flops / (2 * 797e12))


def test_explain_tells_copies_and_units() -> None:
    call = CliRunner().invoke(cli, ["explain", "v32_indexer_h128", "--batch", "2", "--s-q", "5", "--width", "300"])
    assert "units: 2 a request, 4 tokens share a pass over its keys\n" in call.output
    assert (
        "grid: 40 CTAs share up to 12 tiles of 128 keys, smaller ones down to 32 where there are few\n" in call.output
    )
    assert (
        "copies: bulk, one a page of a warp's 32 keys, where pages start at multiples of 16 B, else 4 B" in call.output
    )


def test_the_check_allows_short_sums_where_they_are() -> None:
    def declared(accumulation: str) -> set[bool]:
        index = {"accumulation": accumulation, "forms": ["paged", "blocks"]}
        cases = cases_of(load_spec("v32_decode_h16").replace(index=index), "sm_90a", "quick")
        blocks = [case.call for case in cases if isinstance(case, BlockCase)]
        assert blocks
        return {case.short_sums for case in (*blocks, *cases) if isinstance(case, LogitsCase | StepCase)}

    assert (declared("fp32"), declared("fast")) == ({False}, {True})
