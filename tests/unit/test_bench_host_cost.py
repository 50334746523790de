"""What a call costs the host: every op and way to call it is there, and calls are what they say."""

from dataclasses import replace

import pytest
from fake_driver import GOOD, FakeDriver, fake_cubins
from native_driver import COMPILER, NativeFakeDriver

from dsagen.bench.host_cost import GOALS_US, HostCost, costs_of, goal_rows, host_calls, issue_costs_us, table_rows
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

SPECS = {"v32_h16": 128, "v32_topk_h128": 60, "v32_kv_cache_h128": 40, "v4_kv_cache_h64": 40, "v32_indexer_h128": 128}
SPECS |= {"v32_index_cache_h128": 40, "v4_index_cache_h64": 40}


def make(spec, driver=FakeDriver):
    fake = driver(attributes_of=replace(GOOD, registers=SPECS.get(spec, 128)))
    return fake, Kernels(load_spec(spec), open_driver=lambda: fake, read=fake_cubins)


@pytest.mark.parametrize("spec", SPECS)
def test_each_call_makes_the_launches_that_it_says(spec):
    driver, kernels = make(spec)
    kernels.prepare()
    kernels.freeze()
    loads = list(driver.loads)
    assert len(loads) == len({plan.slug for plan in kernels._on(0).plans})
    found = list(host_calls(kernels))
    assert {op for op, *_ in found} == set(kernels.spec.ops)
    assert len({(op, name) for op, name, *_ in found}) == len(found) >= 2
    for op, name, launches, call in found:
        before = len(driver.launches)
        call()
        assert len(driver.launches) - before == launches, (op, name)
    assert driver.loads == loads, "something was loaded after prepare()"


def test_the_floor_is_the_launch_of_a_plan_that_is_gone():
    driver, kernels = make("v32_h16")
    *_, (_, name, _, floor) = host_calls(kernels)
    launched = driver.launches[-1]
    # Whoever has memory that was let go of writes to it.
    littered = [bytearray(b"\xff" * size) for size in range(8, 1024, 8) for _ in range(20)]
    floor()
    assert littered and name.startswith("floor")
    assert driver.launches[-1] == launched and driver.launches[-1] is not launched


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_costs_of_both_launchers_stand_in_one_row():
    costs = []
    for launcher, driver in (("c", NativeFakeDriver), ("python", FakeDriver)):
        _, kernels = make("v32_h16", driver)
        costs += costs_of(kernels, launcher, lambda: None, calls=2, rounds=3)
    header, rows = table_rows(costs)
    assert header[-2:] == ["us, c", "us, python"]
    assert [row for row in rows if "-" in row[4:]] == [row for row in rows if row[2].startswith("floor")]
    assert all(0 < cost.least_us <= cost.us for cost in costs)
    assert rows[0][:4] == ["v32_h16", "sparse_decode", "main: plan, outputs given", "1"]


def test_a_round_is_divided_by_its_calls():
    spans = iter([4e-6, 20e-6, 8e-6, 40e-6, 6e-6, 60e-6])
    ticks = iter(tick for start, span in enumerate(spans) for tick in (10.0 * start, 10.0 * start + span))
    made, waits = [], []
    ways = [lambda: made.append("a"), lambda: made.append("b")]
    first, second = issue_costs_us(ways, lambda: waits.append(1), 2, 3, clock=lambda: next(ticks))
    assert first == pytest.approx((3.0, 2.0)) and second == pytest.approx((20.0, 10.0))
    # A warm-up of each, and then they take turns.
    assert "".join(made) == "aabb" * 4 and len(waits) == 2 + 6


def test_what_has_a_goal_stands_beside_it():
    us = {"main: plan, outputs given": 5.5, "main: plan": 12.0}
    us |= {"main: torch op": 15.25, "main: torch op, outputs given": 9.0}
    costs = [HostCost("a", "sparse_decode", call, "c", 1, value, 1.0) for call, value in us.items()]
    costs.append(HostCost("a", "sparse_decode", "main: plan", "python", 1, 99.0, 1.0))
    header, rows = goal_rows(costs)
    assert header == ["spec", "call", "us", "goal on an H200"]
    assert rows == [
        ["a", "main: plan, outputs given", "5.50", "6"],
        ["a", "main: torch op, outputs given, more", "3.50", "4"],
        ["a", "main: plan", "12.00", "14"],
        ["a", "main: torch op, more", "3.25", "4"],
    ]
    assert goal_rows([HostCost("a", "topk", "main: plan", "c", 1, 1.0, 1.0)])[1] == []


def test_every_goal_is_of_a_call_that_is_measured():
    _, kernels = make("v32_h16")
    names = {name for _, name, *_ in host_calls(kernels)}
    assert names >= set(GOALS_US) | {name.replace("plan", "torch op") for name in GOALS_US}
