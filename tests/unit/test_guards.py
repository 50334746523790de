"""Every guard of every family: tripped with its message, printed to C, and present where it is enforced."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from guard_trips import TRIPS

import dsagen
from dsagen.arch import arch
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.family import FAMILY, plan_main, variant_caches
from dsagen.families.sparse_decode.geometry import Geometry, fitting_geometry
from dsagen.families.sparse_decode.guards import DEAL_GUARD
from dsagen.family import families
from dsagen.guard import Guard, check, failures
from dsagen.limits import BUILD_GUARDS, CALL_RULES, LOAD_GUARDS
from dsagen.plan import Variant
from dsagen.render import render

COMMON = BUILD_GUARDS + LOAD_GUARDS
GUARDS = [(family.name, guard) for family in families().values() for guard in family.guards]
GUARDS += [("every family", guard) for guard in COMMON]
MAIN = Variant(
    "sparse_decode",
    "main",
    "mma_sync",
    "sm_90a",
    (("kv", "v32"), ("dqk", 576), ("dv", 512), ("n", 16), ("smem", 227)),
)


FITTING = fitting_geometry(variant_caches(MAIN), 16, arch("sm_90a"))


def test_every_guard_has_a_trip_and_one_id() -> None:
    for owner, trips in TRIPS.items():
        ids = [guard.guard_id for name, guard in GUARDS if name == owner]
        assert len(set(ids)) == len(ids)
        assert set(ids) == set(trips)
    assert len({guard.guard_id for guard in COMMON}) == len(COMMON)


@pytest.mark.parametrize(("owner", "guard"), GUARDS, ids=lambda item: getattr(item, "guard_id", ""))
def test_guard_trips_with_its_message(owner: str, guard: Guard) -> None:
    trip = TRIPS[owner][guard.guard_id]
    with pytest.raises(GuardError) as raised:
        check([guard], trip.values, "the-slug", **trip.message_only)
    assert str(raised.value) == f"{trip.message} (the-slug)"
    assert raised.value.exit_code == 2
    assert failures([guard], {**trip.values, **trip.holding}) == []


@pytest.mark.parametrize(("owner", "guard"), GUARDS, ids=lambda item: getattr(item, "guard_id", ""))
def test_guard_prints_to_c(owner: str, guard: Guard) -> None:
    assert guard.to_c({}) == TRIPS[owner][guard.guard_id].c


def test_refusals_that_are_no_guards_are_those_of_the_table() -> None:
    package = Path(dsagen.__file__).parent
    written = {found for path in package.rglob("*.py") for found in re.findall(r"\[([A-Z]+-\d+)\]", path.read_text())}
    assert written == set(CALL_RULES)


@pytest.mark.parametrize("rule", CALL_RULES)
def test_every_rule_of_the_table_is_tripped_by_a_test(rule: str) -> None:
    assert any(f"[{rule}" in path.read_text().replace("\\", "") for path in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize(
    ("geometry", "guard_id"),
    [
        (replace(FITTING, stages=40), "K-01"),
        (replace(FITTING, stages=2), "SD-01"),
        (replace(FITTING, tile_tokens=48, stages=6), "SD-02"),
        (replace(FITTING, score_warps=2), "SD-02"),
        (replace(FITTING, registers=(136, 232, 24)), "SD-15"),
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
    # That of the deal of heads is of a spec: no kernel knows how many there are.
    planned = [guard for guard in FAMILY.guards if guard.when == "plan" and guard is not DEAL_GUARD]
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
