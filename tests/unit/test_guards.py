"""Every guard of every family: tripped with its message, printed to C, and present where it is enforced."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dsagen.arch import arch
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.family import FAMILY, plan_main
from dsagen.families.sparse_decode.geometry import Geometry
from dsagen.family import families
from dsagen.guard import Guard, check, failures
from dsagen.plan import Variant
from dsagen.render import render


@dataclass(frozen=True)
class Trip:
    """Values that a guard refuses, the complete message, and the expression in C."""

    values: dict[str, int]
    message: str
    c: str
    holding: dict[str, int]


K_CACHE = {"k_cache_address": 256, "page_stride_bytes": 41984, "row_stride_bytes": 656}
PAGES = {"pages": 2, "page_size": 64, "page_bytes": 41984, "io_row_stride_bytes": 656}
STRIDES = {"q_address": 32, "q_stride_b": 576, "q_stride_s": 576, "q_stride_h": 576}
OUT = {"out_address": 32, "out_stride_b": 512, "out_stride_s": 512, "out_stride_h": 512}

TRIPS: dict[str, dict[str, Trip]] = {
    "sparse_decode": {
        "K-01": Trip(
            {"smem_bytes": 232449, "smem_optin_bytes": 232448},
            "[K-01] shared memory: the plan needs 232449 B and a block may have 232448 B: use fewer stages, a smaller "
            "tile or fewer heads in a CTA",
            "smem_bytes <= smem_optin_bytes",
            {"smem_bytes": 232448},
        ),
        "K-02": Trip(
            {"threads": 512, "registers_cap": 129, "registers_per_sm": 65536},
            "[K-02] registers: 512 threads x 129 exceed the SM's 65536: use fewer warps",
            "(threads * registers_cap) <= registers_per_sm",
            {"registers_cap": 128},
        ),
        "SD-01": Trip(
            {"stages": 1},
            "[SD-01] stages 1 < 2: a tile must be in flight while another is used",
            "stages >= 2",
            {"stages": 2},
        ),
        "SD-02": Trip(
            {"tile_tokens": 48, "warps": 8},
            "[SD-02] tile of 48 tokens: must be a multiple of 16 that divides 16 x 8 warps",
            "((tile_tokens % 16) == 0 && ((16 * warps) % tile_tokens) == 0)",
            {"tile_tokens": 64},
        ),
        "SD-03": Trip(
            {"heads_n": 20},
            "[SD-03] heads in a CTA: 20 must be a multiple of 8 in 8..64",
            "(8 <= heads_n && heads_n <= 64 && (heads_n % 8) == 0)",
            {"heads_n": 24},
        ),
        "SD-05": Trip(
            {"row_bytes": 656, "row_pitch_bytes": 672},
            "[SD-05] row of 656 B at pitch 672 B: rows are copied 16 B at a time and the pitch must be an odd multiple "
            "of 16 B to be free of bank conflicts",
            "((row_bytes % 16) == 0 && (row_pitch_bytes % 32) == 16)",
            {"row_pitch_bytes": 656},
        ),
        "SD-04": Trip(
            {"num_splits": 33, "tile_tokens": 64, "topk": 2048, "all_tiles": 32},
            "[SD-04] num_splits 33: 2048 index columns in tiles of 64 tokens are 32 tiles, so at least one split could "
            "never hold a token. Use num_splits <= 32",
            "(num_splits == 1 || (tile_tokens * (num_splits - 1)) < topk)",
            {"num_splits": 32},
        ),
        "SD-06": Trip(
            {"topk": 2049, "topk_capacity": 2048},
            "[SD-06] indices: 2049 columns, the spec declares topk 2048: pass 1..2048 columns or raise `topk` in "
            "the spec",
            "(1 <= topk && topk <= topk_capacity)",
            {"topk": 2048},
        ),
        "SD-07": Trip(
            {"heads": 64, "spec_heads": 16},
            "[SD-07] q: 64 heads, the spec declares 16: pass q with 16 heads or load a spec for 64",
            "heads == spec_heads",
            {"heads": 16},
        ),
        "SD-08": Trip(
            {"main_ctas": 2**31, "combine_ctas": 1},
            "[SD-08] grid: 2147483648 CTAs (combine 1) exceed 2147483647: use fewer splits or a smaller batch",
            "(main_ctas <= 2147483647 && combine_ctas <= 2147483647)",
            {"main_ctas": 2**31 - 1},
        ),
        "SD-09": Trip(
            {"pool_tokens": 2**31},
            "[SD-09] k_cache: 2147483648 tokens cannot be addressed by int32 indices, at most 2147483647 can: pass a "
            "smaller pool",
            "pool_tokens <= 2147483647",
            {"pool_tokens": 2**31 - 1},
        ),
        "SD-10": Trip(
            {"pages": 0, "page_size": 64},
            "[SD-10] k_cache: 0 pages of 64 tokens: at least one page of 1..1073741824 tokens is needed",
            "(pages >= 1 && 1 <= page_size && page_size <= 1073741824)",
            {"pages": 1},
        ),
        "SD-11": Trip(
            {**K_CACHE, "page_stride_bytes": 41992},
            "[SD-11] k_cache: base address 0x100, page stride 41992 B and row stride 656 B must be multiples of 16 B: "
            "pad the pages",
            "((page_stride_bytes % 16) == 0 && (row_stride_bytes % 16) == 0 && (k_cache_address % 16) == 0)",
            {"page_stride_bytes": 41984},
        ),
        "SD-12": Trip(
            {**K_CACHE, **PAGES, "page_stride_bytes": 41968},
            "[SD-12] k_cache: row stride 656 B and page stride 41968 B do not hold pages of 64 rows of 656 B (41984 "
            "B): rows of a page must be adjacent and pages must not overlap",
            "(row_stride_bytes == io_row_stride_bytes && (pages == 1 || page_stride_bytes >= page_bytes))",
            {"page_stride_bytes": 41984},
        ),
        "SD-13": Trip(
            {**STRIDES, "q_stride_h": 580},
            "[SD-13] q: address 0x20 and strides (576, 576, 580) elements: rows must start at multiples of 16 B, so "
            "strides must be multiples of 8 elements",
            "((q_address % 16) == 0 && (q_stride_b % 8) == 0 && (q_stride_s % 8) == 0 && (q_stride_h % 8) == 0)",
            {"q_stride_h": 584},
        ),
        "SD-14": Trip(
            {**OUT, "out_stride_b": 513},
            "[SD-14] out: address 0x20 and strides (513, 512, 512) elements: rows must start at multiples of 4 B, so "
            "strides must be even",
            "((out_address % 4) == 0 && (out_stride_b % 2) == 0 && (out_stride_s % 2) == 0 && (out_stride_h % 2) == 0)",
            {"out_stride_b": 514},
        ),
    },
}

GUARDS = [(family, guard) for family in families().values() for guard in family.guards]
MAIN = Variant(
    "sparse_decode",
    "main",
    "mma_sync",
    "sm_90a",
    (("kv", "v32"), ("dqk", 576), ("dv", 512), ("n", 16), ("smem", 227)),
)


def test_every_guard_has_a_trip_and_one_id() -> None:
    for name, family in families().items():
        ids = [guard.guard_id for guard in family.guards]
        assert len(set(ids)) == len(ids)
        assert set(ids) == set(TRIPS[name])


@pytest.mark.parametrize(("family", "guard"), GUARDS, ids=lambda item: getattr(item, "guard_id", ""))
def test_guard_trips_with_its_message(family: object, guard: Guard) -> None:
    trip = TRIPS[family.name][guard.guard_id]
    with pytest.raises(GuardError) as raised:
        check([guard], trip.values, "the-slug")
    assert str(raised.value) == f"{trip.message} (the-slug)"
    assert raised.value.exit_code == 2
    assert failures([guard], {**trip.values, **trip.holding}) == []


@pytest.mark.parametrize(("family", "guard"), GUARDS, ids=lambda item: getattr(item, "guard_id", ""))
def test_guard_prints_to_c(family: object, guard: Guard) -> None:
    assert guard.to_c({}) == TRIPS[family.name][guard.guard_id].c


@pytest.mark.parametrize(
    ("geometry", "guard_id"),
    [
        (Geometry(16, 64, 8, 6), "K-01"),
        (Geometry(16, 64, 8, 1), "SD-01"),
        (Geometry(16, 48, 8, 2), "SD-02"),
    ],
)
def test_a_plan_that_breaks_a_limit_is_refused_with_the_slug(geometry: Geometry, guard_id: str) -> None:
    with pytest.raises(GuardError) as raised:
        plan_main(MAIN, geometry)
    assert str(raised.value).startswith(f"[{guard_id}] ")
    assert str(raised.value).endswith(f" ({MAIN.slug})")


def test_a_variant_with_an_odd_head_count_is_refused() -> None:
    axes = tuple((name, 20 if name == "n" else value) for name, value in MAIN.axes)
    with pytest.raises(GuardError, match=r"^\[SD-03\] heads in a CTA: 20 "):
        FAMILY.plan(Variant(MAIN.family, MAIN.kernel, MAIN.body, MAIN.arch, axes))


def test_every_plan_guard_is_asserted_in_the_unit() -> None:
    plan = FAMILY.plan(MAIN)
    text = render(plan).text
    planned = [guard for guard in FAMILY.guards if guard.when == "plan"]
    assert [guard.guard_id for guard in plan.guards] == [guard.guard_id for guard in planned]
    for guard in plan.guards:
        assert f'static_assert({guard.c_expression}, "[{guard.guard_id}] {guard.expression}");' in text
        assert f"//   [{guard.guard_id}] {guard.expression}" in text


def test_the_smem_guard_speaks_of_the_struct_and_the_arch() -> None:
    smem = next(guard for guard in FAMILY.plan(MAIN).guards if guard.guard_id == "K-01")
    assert smem.c_expression == f"static_cast<int>(sizeof(SharedStorage)) <= {arch('sm_90a').smem_optin_bytes}"


@pytest.mark.parametrize(
    "expression",
    ["f(x)", "x if y else z", "x.y", "x[0]", "x & 1", "1.5 < x", "x is y", "'a' == x", "x ==", "x / 2 > 1"],
)
def test_what_is_outside_the_language_is_refused_where_it_is_written(expression: str) -> None:
    with pytest.raises(ValueError, match="X-01"):
        Guard("X-01", "plan", expression, "never")


@pytest.mark.parametrize(
    ("expression", "values", "holds", "c"),
    [
        ("not a", {"a": 0}, True, "!(a)"),
        ("-a < 0", {"a": 3}, True, "-(a) < 0"),
        ("a // 2 == 3", {"a": 7}, True, "(a / 2) == 3"),
        ("a < b < c", {"a": 1, "b": 2, "c": 2}, False, "(a < b && b < c)"),
        ("a - b * c != 1 or True", {"a": 7, "b": 2, "c": 3}, True, "((a - (b * c)) != 1 || true)"),
    ],
)
def test_the_language_means_the_same_in_python_and_c(
    expression: str, values: dict[str, int], holds: bool, c: str
) -> None:
    guard = Guard("X-01", "plan", expression, "never")
    assert guard.holds(values) is holds
    assert guard.to_c({}) == c
    assert guard.names == tuple(sorted(values))


def test_a_value_that_is_missing_is_not_taken_for_anything() -> None:
    with pytest.raises(KeyError, match="b"):
        Guard("X-01", "plan", "a < b", "never").holds({"a": 1})
