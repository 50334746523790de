"""The timing protocol on a scripted device: what runs when, what is timed, what the figures mean."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from dsagen.bench import timing
from dsagen.errors import DeviceError


class ScriptedDevice:
    """Stands in for torch.cuda: replays take the scripted milliseconds, and everything that happens is logged."""

    def __init__(self, replay_ms):
        self.replay_ms = replay_ms
        self.clock_ms = 0.0
        self.replays = 0
        self.log = []
        self.capturing = False
        self.streams = []

    def install(self, monkeypatch):
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.at_ms = None

            def record(self):
                self.at_ms = device.clock_ms
                device.log.append("record")

            def synchronize(self):
                device.log.append("sync")

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        class CUDAGraph:
            def replay(self):
                device.clock_ms += device.replay_ms(device.replays)
                device.replays += 1
                device.log.append("replay")

            def reset(self):
                device.log.append("reset")

        class Capture:
            def __init__(self, graph, stream):
                assert isinstance(graph, CUDAGraph)
                self.stream = stream

            def __enter__(self):
                device.capturing = True
                device.streams.append(self.stream)

            def __exit__(self, *exc):
                device.capturing = False
                device.streams.pop()

        class Stream:
            def wait_stream(self, other):
                pass

            def __enter__(self):
                device.streams.append(self)

            def __exit__(self, *exc):
                device.streams.pop()

        for name, value in {
            "is_available": lambda: True,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": Capture,
            "Stream": Stream,
            "stream": lambda stream: stream,
            "current_stream": Stream,
            "synchronize": lambda: device.log.append("sync"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        return device


@pytest.mark.parametrize(
    ("bytes_per_call", "sets"),
    [(1, timing.MAX_SETS), (2_000_000, 135), (timing.COLD_BYTES, timing.MIN_SETS), (1 << 40, timing.MIN_SETS)],
)
def test_input_sets_cover_the_cold_size(bytes_per_call, sets):
    assert timing.input_sets_for(bytes_per_call) == sets
    if timing.MIN_SETS < sets < timing.MAX_SETS:
        assert sets * bytes_per_call >= timing.COLD_BYTES > (sets - 1) * bytes_per_call


def test_input_sets_limits_can_be_set_and_nonsense_is_refused():
    assert timing.input_sets_for(1, most=5) == 5
    assert timing.input_sets_for(1 << 40, least=1) == 1
    assert timing.input_sets_for(10, total_bytes=95) == 10
    with pytest.raises(ValueError, match="bytes_per_call"):
        timing.input_sets_for(0)


def test_summary_is_per_call_with_spread_of_the_replays():
    summary = timing.summarise_replays([1.3, 1.0, 1.1, 1.2, 9.0, 1.15, 1.05, 1.25, 0.2, 1.1, 1.1], sets=10)
    assert summary.median_us == pytest.approx(110.0)
    assert summary.spread == pytest.approx((1.3 - 1.0) / 1.1)
    assert (summary.sets, summary.replays) == (10, 11)


def test_graph_time_warms_each_call_then_captures_each_once(monkeypatch):
    device = ScriptedDevice(lambda replay: 2.0).install(monkeypatch)
    seen, streams = [], set()

    def call(index):
        seen.append((index, device.capturing))
        streams.add(device.streams[-1])

    result = timing.graph_time_us([functools.partial(call, index) for index in range(3)])
    assert len(streams) == 1
    assert seen == [(0, False), (1, False), (2, False), (0, True), (1, True), (2, True)]
    assert result.median_us == pytest.approx(2000.0 / 3)
    assert result.spread == 0.0
    assert (result.sets, result.replays) == (3, 30)
    assert device.log[-1] == "reset"


def test_timed_replays_are_queued_back_to_back(monkeypatch):
    device = ScriptedDevice(lambda replay: 10.0).install(monkeypatch)
    timing.graph_time_us([lambda: None], warm_ms=30.0, budget_ms=50.0)
    # The pilot, the warm-up, then one lead-in replay and MIN_REPLAYS timed ones with no wait for the CPU between them.
    timed = ["replay", "record"] + ["replay", "record"] * timing.MIN_REPLAYS + ["sync", "reset"]
    assert device.log[-len(timed) :] == timed
    warm = device.log[: -len(timed)]
    assert warm[-4:] == ["replay", "replay", "replay", "sync"]


def test_slow_first_replays_do_not_reach_the_figure(monkeypatch):
    cold = ScriptedDevice(lambda replay: 100.0 if replay < 5 else 1.0).install(monkeypatch)
    result = timing.graph_time_us([lambda: None], warm_ms=500.0)
    assert result.median_us == pytest.approx(1000.0)
    assert result.spread == 0.0
    assert cold.replays > 5 + result.replays


def test_replay_count_is_bounded(monkeypatch):
    ScriptedDevice(lambda replay: 0.001).install(monkeypatch)
    assert timing.graph_time_us([lambda: None]).replays == timing.MAX_REPLAYS


def test_contestants_alternate_and_each_keeps_its_own_times(monkeypatch):
    device = ScriptedDevice(lambda replay: 1.0).install(monkeypatch)
    running = []

    def cost(replay):
        return {"a": 2.0, "b": 5.0}[running[-1]]

    device.replay_ms = cost

    class Named(timing.Contestant):
        def __init__(self, name):
            self.name = name
            running.append(name)
            super().__init__([lambda: None, lambda: None], warm_ms=10.0)

        def turn(self, replays):
            running.append(self.name)
            turns.append((self.name, replays))
            super().turn(replays)

    turns = []
    contestants = [Named("a"), Named("b")]
    timing.take_turns(contestants, turns=3, budget_ms=60.0)
    # 30 replays of 2 ms and 12 of 5 ms, a third of them in each turn; every second round goes backwards.
    assert turns == [("a", 10), ("b", 4), ("b", 4), ("a", 10), ("a", 10), ("b", 4)]
    assert [(one.timing.median_us, one.timing.replays) for one in contestants] == [(1000.0, 30), (2500.0, 12)]
    assert "reset" not in device.log
    contestants[0].close()
    assert device.log[-1] == "reset" and contestants[0].timing.sets == 2


def test_few_slow_replays_are_at_least_as_many_as_alone(monkeypatch):
    ScriptedDevice(lambda replay: 100.0).install(monkeypatch)
    contestant = timing.Contestant([lambda: None])
    timing.take_turns([contestant], turns=2, budget_ms=1.0)
    assert contestant.timing.replays >= timing.MIN_REPLAYS


def test_what_calls_hold_lives_as_long_as_their_graph(monkeypatch):
    ScriptedDevice(lambda replay: 1.0).install(monkeypatch)

    class Plan:
        def call(self):
            """What a peer's calls do: its lists and workspace are in memory that goes with this."""

    plan = Plan()
    seen = weakref.ref(plan)
    contestant = timing.Contestant([plan.call])
    del plan
    gc.collect()
    assert seen() is not None
    contestant.turn(1)
    contestant.close()
    gc.collect()
    assert seen() is None and contestant.timing.sets == 1


def test_eager_cost_separates_issue_from_completion(monkeypatch):
    ScriptedDevice(lambda replay: 1.0).install(monkeypatch)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    waits = iter([0.0, 3e-3, 1e-3, 9e-3])

    def synchronize():
        clock.now += next(waits)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    order = []

    def call(index):
        order.append(index)
        clock.now += 5e-6

    calls = [lambda index=index: call(index) for index in range(2)]
    issue_us, wall_us = timing.eager_cost_us(calls, calls_per_round=100, rounds=3)
    assert issue_us == pytest.approx(5.0)
    # Walls of the three rounds: 35, 15 and 95 us per call.
    assert wall_us == pytest.approx(35.0)
    assert len(order) == 2 + 300
    assert order[2:6] == [0, 1, 0, 1]


@pytest.mark.parametrize("measure", [timing.graph_time_us, timing.eager_cost_us])
def test_no_device_and_no_calls_are_said(monkeypatch, measure):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        measure([lambda: pytest.fail("nothing may run without a device")])
    with pytest.raises(ValueError, match="list of calls is empty"):
        measure([])
