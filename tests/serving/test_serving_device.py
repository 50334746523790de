"""What a serving engine does with the kernels, on a device: CUDA graphs, torch.compile, streams, threads, devices."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from engine import HEADS, TOPK, Engine, run
from repeating import answers_of, require_repeated

import dsagen
from dsagen.bench.host_cost import GOALS_US, OP_GOAL_US, goal_rows, host_calls, measure_host_costs
from dsagen.check.run import device_problem
from dsagen.cli.table import aligned
from dsagen.errors import FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.driver import CudaDriver
from dsagen.spec import DeploymentSpec, load_spec

pytestmark = pytest.mark.gpu

BATCH, PAGES, PAGE = 4, 64, 64


def spec() -> DeploymentSpec:
    """All ops of a deployment; its kernels are those of the shipped specs."""
    return load_spec("v32_h16").replace(
        name="serving_h16", ops=["sparse_decode", "topk", "kv_cache"], scores="fp32", kv_write={"rows": "bf16"}
    )


@pytest.fixture(scope="module", autouse=True)
def needs_device() -> None:
    problem = device_problem(load_spec("v32_h16"))
    if problem:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = dsagen.load(spec())
    loaded.prepare()
    return loaded


def decode_inputs(seed: int = 0, batch: int = BATCH, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 1, HEADS, 576, generator=generator).bfloat16()
    cache = torch.randint(0, 56, (PAGES, PAGE, 1, 656), generator=generator, dtype=torch.uint8)
    cache[..., 512:528].view(torch.float32).fill_(0.1)
    cache[..., 528:].view(torch.bfloat16).fill_(0.5)
    ids = torch.randint(-1, PAGES * PAGE, (batch, 1, TOPK), generator=generator, dtype=torch.int32)
    return tuple(tensor.to(device) for tensor in (q, cache, ids))


def same(found, expected) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.equal(want)


def test_both_launchers_give_the_same_bits() -> None:
    results = []
    for launcher in ("c", "python"):
        loaded = Kernels(spec(), open_driver=partial(CudaDriver, launcher))
        assert (loaded._driver.launcher() is not None) == (launcher == "c")
        for splits in (1, 8):
            plan = loaded.plan_sparse_decode(BATCH, 1, TOPK, num_splits=splits)
            for seed in range(3):
                results.append((launcher, loaded.sparse_decode(*decode_inputs(seed), plan=plan)))
        results.append((launcher, (loaded.topk(torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)).cuda(),
                                               k=100, determinism="order"),)))  # fmt: skip
    in_c, in_python = ([pair for name, pair in results if name == launcher] for launcher in ("c", "python"))
    for got, want in zip(in_c, in_python, strict=True):
        same(got, want)


def test_the_launcher_in_c_repeats_known_calls_of_device_tensors(kernels: Kernels) -> None:
    assert kernels._driver._launcher.exchange, kernels._driver._launcher.problem
    answers = answers_of(kernels, *decode_inputs())
    require_repeated(answers)
    same(answers.known, answers.checked)
    same(answers.given, answers.checked)


def test_a_graph_replays_with_changed_contents(kernels: Kernels) -> None:
    q, cache, ids = decode_inputs()
    # As many splits in both, for other splits are other bits.
    plan, eager = (kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=8) for _ in range(2))
    length = torch.full((BATCH,), TOPK, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.sparse_decode(q, cache, ids, topk_length=length, plan=plan)
    for seed, lengths in ((1, (TOPK, 5, 0, 700)), (2, (0, 0, 0, 0)), (3, (1, 0, TOPK, 64))):
        for buffer, value in zip((q, cache, ids), decode_inputs(seed), strict=True):
            buffer.copy_(value)
        length.copy_(torch.tensor(lengths))
        out.fill_(7)
        graph.replay()
        same((out, lse), kernels.sparse_decode(q, cache, ids, topk_length=length, plan=eager))


def test_layers_of_a_graph_share_a_workspace_and_fewer_rows_do_nothing(kernels: Kernels) -> None:
    engine = Engine(kernels, layers=3, batch=BATCH, max_pages=4, topk=128)
    live = [4, 1, 3, 0, 2, 4] * 4
    expected = run(engine, len(live), live.__getitem__, engine.step)
    engine.decode_plan.rebind()
    engine.topk_plan.rebind()
    graph = torch.cuda.CUDAGraph()
    engine.slots.fill_(-1)
    engine.lengths.zero_()
    with torch.cuda.graph(graph):
        engine.step()
    found = run(engine, len(live), live.__getitem__, graph.replay)
    same(found, expected)


def test_a_plan_is_refused_on_a_second_stream(kernels: Kernels) -> None:
    q, cache, ids = decode_inputs()
    plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=8)
    want = kernels.sparse_decode(q, cache, ids, plan=plan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(GuardError, match=r"\[T-10\]"):
            kernels.sparse_decode(q, cache, ids, plan=plan)
        plan.rebind()
        same(kernels.sparse_decode(q, cache, ids, plan=plan), want)
    torch.cuda.synchronize()


def test_nothing_is_loaded_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    load = CudaDriver.load_kernel
    monkeypatch.setattr(CudaDriver, "load_kernel", lambda self, *call: (loads.append(call[0]), load(self, *call))[1])
    fresh = dsagen.load(spec())
    q, cache, ids = decode_inputs()
    with pytest.raises(FrozenError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh.sparse_decode(q, cache, ids)
    fresh.prepare()
    fresh.freeze()
    prepared = len(loads)
    assert prepared == len({plan.slug for plan in fresh._on(fresh.device.index).plans})
    for *_, call in host_calls(fresh):
        call()
    torch.cuda.synchronize()
    assert len(loads) == prepared


def test_what_a_call_costs_the_host_stands_beside_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    """The goals are of an idle H200's host, so they are shown here, and `dsagen bench --host` has the rest."""
    costs = measure_host_costs(load_spec("v32_h16"))
    header, rows = goal_rows(costs)
    with capsys.disabled():
        print("\n" + "\n".join(aligned(rows, header, indent=2)))
    us = {(cost.launcher, cost.call): cost.least_us for cost in costs}
    for call in GOALS_US:
        assert us["c", call] < us["python", call], f"{call}: the launcher in C repeats nothing"
        # A call that goes through Python takes more.
        assert us["c", call.replace("plan", "torch op")] - us["c", call] < 3 * OP_GOAL_US, call


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_is_the_eager_one(kernels: Kernels, mode: str) -> None:
    torch._dynamo.reset()
    scores = torch.randn(BATCH, PAGES * PAGE, device="cuda")
    weight = torch.randn(HEADS * 512, 32, device="cuda")

    def step(q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = kernels.topk(scores, k=TOPK, determinism="order")
        out, lse = kernels.sparse_decode(q, cache, ids[:, None])
        second, _ = kernels.sparse_decode((q * 0.5), cache, ids[:, None])
        return (out.float() + second.float()).flatten(1) @ weight, lse * 2

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(6):
        q, cache, _ = decode_inputs(seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in compiled(q, cache)]
        for got, want in zip(found, step(q, cache), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


def test_threads_with_streams_of_their_own(kernels: Kernels) -> None:
    expected = [kernels.sparse_decode(*decode_inputs(seed)) for seed in range(4)]
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            tensors = decode_inputs(seed)
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    found = kernels.sparse_decode(*tensors)
                stream.synchronize()
            same(found, expected[seed])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_tensors_decide_the_device(kernels: Kernels) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(
            f"needs two CUDA devices, and {torch.cuda.device_count()} is visible here: what a CPU can show of two is "
            "in tests/unit/test_two_devices.py"
        )
    kernels.prepare([0, 1])
    assert torch.cuda.current_device() == 0
    want = kernels.sparse_decode(*decode_inputs(device="cuda:0"))
    there = decode_inputs(device="cuda:1")
    plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, device=1)
    for _ in range(3):
        for found in (kernels.sparse_decode(*there), kernels.sparse_decode(*there, plan=plan)):
            assert {tensor.device.index for tensor in found} == {1}
            same([tensor.cpu() for tensor in found], [tensor.cpu() for tensor in want])
        # The stream of that device counts, whichever is current on this one.
        with torch.cuda.stream(torch.cuda.Stream(0)):
            same([t.cpu() for t in kernels.sparse_decode(*there, plan=plan)], [t.cpu() for t in want])
    q, cache, ids = decode_inputs(device="cuda:0")
    with pytest.raises(GuardError, match=r"\[T-09\] plan: made for device cuda:1, the tensors have device cuda:0"):
        kernels.sparse_decode(q, cache, ids, plan=plan)
    with pytest.raises(GuardError, match=r"\[T-03\] k_cache: on cuda:1, q is on cuda:0"):
        kernels.sparse_decode(q, there[1], ids)
    assert torch.cuda.current_device() == 0


def test_debug_knobs_change_no_result(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    tensors = decode_inputs()
    want = kernels.sparse_decode(*tensors)
    for knob in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_POISON_WORKSPACE"):
        monkeypatch.setenv(knob, "1")
    debugged = dsagen.load(spec())
    for splits in (1, 8):
        plan = debugged.plan_sparse_decode(BATCH, 1, TOPK, num_splits=splits)
        for _ in range(2):
            found = debugged.sparse_decode(*tensors, plan=plan)
        torch.testing.assert_close(found[0], want[0], rtol=2e-2, atol=1e-3)
    same(debugged.sparse_decode(*tensors), want)
