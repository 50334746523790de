"""What a call costs the host: every op and way to call it is there, and calls are what they say."""

from dataclasses import replace

import pytest
from fake_driver import GOOD, FakeDriver, fake_cubins
from native_driver import COMPILER, NativeFakeDriver

from dsagen.bench.host_cost import costs_of, host_calls, issue_cost_us, table_rows
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

SPECS = {"v32_h16": 128, "v32_topk_h128": 60, "v32_kv_cache_h128": 40, "v4_kv_cache_h64": 40}


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
    assert len({(op, name) for op, name, *_ in found}) == len(found) >= 5
    for op, name, launches, call in found:
        before = len(driver.launches)
        call()
        assert len(driver.launches) - before == launches, (op, name)
    assert driver.loads == loads, "something was loaded after prepare()"


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


def test_a_round_is_divided_by_its_calls(monkeypatch):
    ticks = iter([0.0, 4e-6, 10.0, 10.0 + 8e-6, 20.0, 20.0 + 6e-6])
    monkeypatch.setattr("dsagen.bench.host_cost.time.perf_counter", lambda: next(ticks))
    made, waits = [], []
    assert issue_cost_us(lambda: made.append(1), lambda: waits.append(1), 2, 3) == pytest.approx((3.0, 2.0))
    assert (len(made), len(waits)) == (2 + 6, 4)
