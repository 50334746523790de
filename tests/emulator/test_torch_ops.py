"""The ops as torch knows them, on the emulator: torch's own checks of an op, and what torch.compile makes of a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from op_calls import (
    CALLS,
    HEADS,
    PAGE,
    PAGES,
    SLOTS,
    TOPK,
    K,
    chain_call,
    fp8_keys,
    ids,
    lengths,
    levels_call,
    logits_call,
    one_request,
    outputs,
    pool,
    q,
    ragged_call,
    rows,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsagen
from dsagen.emulator import Counts
from dsagen.errors import GuardError
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.runtime.torch_ops import SCHEMAS

pytestmark = pytest.mark.compile

OPS = torch.ops.dsagen


@pytest.fixture(scope="module")
def store(shared_store: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
        yield


LAUNCHES: list[str] = []


def observe(launch: EmulatedLaunch) -> None:
    assert isinstance(launch.counts, Counts)
    LAUNCHES.append(launch.symbol)


def load(name: str) -> dsagen.Kernels:
    return dsagen.load(name, device="emulator", emulator=EmulatorOptions(races=False, observe=observe))


@pytest.fixture(scope="module")
def decode(store: None) -> dsagen.Kernels:
    return load("v32_h16")


@pytest.fixture(scope="module")
def select(store: None) -> dsagen.Kernels:
    return load("v32_topk_h128")


@pytest.fixture(scope="module")
def caches(store: None) -> dsagen.Kernels:
    return load("v32_kv_cache_h128")


@pytest.fixture(scope="module")
def v41(store: None) -> dsagen.Kernels:
    return load("v41_kv_cache_h64")


@pytest.fixture(scope="module")
def index(store: None) -> dsagen.Kernels:
    return load("v32_index_cache_h128")


@pytest.fixture(scope="module")
def indexer(store: None) -> dsagen.Kernels:
    return load("v4_indexer_h64")


@pytest.fixture(scope="module")
def candidates(store: None) -> dsagen.Kernels:
    return load("v41_indexer_candidates_h64")


@pytest.fixture(scope="module")
def chain(store: None) -> dsagen.Kernels:
    return load("v32_decode_h16")


@pytest.fixture(scope="module")
def levels(store: None) -> dsagen.Kernels:
    return load("v41_decode_h16")


@pytest.fixture
def all_kernels(
    decode: dsagen.Kernels,
    select: dsagen.Kernels,
    caches: dsagen.Kernels,
    v41: dsagen.Kernels,
    index: dsagen.Kernels,
    indexer: dsagen.Kernels,
    candidates: dsagen.Kernels,
    chain: dsagen.Kernels,
    levels: dsagen.Kernels,
) -> dict[str, dsagen.Kernels]:
    found = {"decode": decode, "select": select, "caches": caches, "v41": v41, "index": index, "indexer": indexer}
    return {**found, "candidates": candidates, "chain": chain, "levels": levels}


@pytest.mark.parametrize("op", SCHEMAS)
def test_torch_finds_nothing_wrong_with_an_op(op: str, all_kernels: dict[str, dsagen.Kernels]) -> None:
    kernels, arguments = CALLS[op]
    positional, named = arguments(all_kernels[kernels].handle)
    found = torch.library.opcheck(getattr(OPS, op).default, positional, named)
    assert set(found.values()) == {"SUCCESS"}


def test_an_op_gives_what_the_method_gives(all_kernels: dict[str, dsagen.Kernels]) -> None:
    decode, select, caches = all_kernels["decode"], all_kernels["select"], all_kernels["caches"]
    call = (q(), pool(), ids())
    for got, want in zip(OPS.sparse_decode(*call, decode.handle), decode.sparse_decode(*call), strict=True):
        assert got.equal(want) and got.stride() == want.stride() and got.dtype == want.dtype
    scores = torch.randn(3, 60)
    assert OPS.topk(scores, select.handle, K).equal(select.topk(scores, k=K))
    cache, slots = pool(), lengths(4, 9)
    assert OPS.kv_read(cache, caches.handle, slots).equal(caches.kv_read(cache, slots=slots))
    index, keys = all_kernels["index"], fp8_keys()
    index.index_write(rows(3, 128), keys, lengths(32, 35, 34))
    for got, want in zip(OPS.index_gather(keys, index.handle, *one_request(), 5),
                         index.index_gather(keys, *one_request(), 5), strict=True):  # fmt: skip
        assert torch.equal(got, want) and got.dtype == want.dtype


def step(all_kernels: dict[str, dsagen.Kernels], plan: Any = None, **given: Tensor) -> Callable[..., Any]:
    """A decode step as an engine writes it: store the new row, select, attend, project."""
    decode, select, caches = all_kernels["decode"], all_kernels["select"], all_kernels["caches"]
    index, keys = all_kernels["index"], fp8_keys()

    def run(query: Tensor, cache: Tensor, row: Tensor, slot: Tensor, scores: Tensor, weight: Tensor) -> Any:
        caches.kv_write(row, cache, slot)
        picked = select.topk(scores, k=TOPK, determinism="order")
        out, lse = decode.sparse_decode(query, cache, picked[:, None], plan=plan, **given)
        back = caches.kv_read(cache, slots=slot)
        index.index_write(row[:, :128].contiguous(), keys, slot)
        _, scales = index.index_gather(keys, *one_request(), 5)
        return (out.float().flatten(2) @ weight).relu(), lse * 2, picked, back, scales

    return run


def step_inputs(batch: int = 2) -> tuple[Tensor, ...]:
    slot = torch.arange(batch, dtype=torch.int32) * 7
    return q(batch), pool(), rows(batch), slot, torch.randn(batch, PAGES * PAGE), torch.randn(HEADS * 512, 4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_compiles_as_one_graph(backend: str, all_kernels: dict[str, dsagen.Kernels]) -> None:
    torch._dynamo.reset()
    run = step(all_kernels)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for _ in range(2):
        inputs = step_inputs()
        mine = tuple(tensor.clone() for tensor in inputs)
        expected, found = run(*inputs), compiled(*mine)
        for want, got in zip(expected, found, strict=True):
            torch.testing.assert_close(got, want)
        assert mine[1].equal(inputs[1]), "the write into the cache was lost"


def test_scores_of_an_indexer_compile_as_one_graph_with_what_follows(indexer: dsagen.Kernels) -> None:
    torch._dynamo.reset()
    out = torch.zeros(2, 41)

    def run(paged: Any, ragged: Any, paged_options: Any, ragged_options: Any) -> tuple[Tensor, ...]:
        scores = indexer.indexer_logits(*paged, **paged_options)
        given = indexer.indexer_logits(*paged, **paged_options, out=out)
        rows = indexer.indexer_logits_ragged(*ragged, **ragged_options)
        packed = indexer.indexer_logits_ragged(*ragged, **ragged_options, max_window=30)
        return scores * 2, scores, given + 1, rows.relu(), packed

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (paged, paged_options), (ragged, ragged_options) = logits_call(), ragged_call()
    inputs = (paged, ragged, paged_options, ragged_options)
    want, kept = run(*inputs), out.clone()
    out.zero_()
    for mine, theirs in zip(compiled(*inputs), want, strict=True):
        assert mine.equal(theirs)
    assert out.equal(kept) and want[1].stride() == (44, 1) and compiled(*inputs)[1].stride() == (44, 1)
    with pytest.raises(Exception, match="T-21"):
        compiled(paged, ragged, {"q_scales": paged_options["q_scales"]}, ragged_options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layers_that_share_a_selection_compile_as_one_graph(backend: str, chain: dsagen.Kernels) -> None:
    torch._dynamo.reset()
    plan, eager = (chain.plan_decode_step(1, 2, PAGES * PAGE, k=K, determinism="order") for _ in range(2))
    given, other = chain_call(), torch.randn(1, 2, HEADS, 576).bfloat16()

    def run(plan: Any, q: Tensor, k_cache: Tensor, other: Tensor, index: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, _ = chain.decode_step(q, k_cache, plan=plan, **index)
        second, lse = chain.decode_step(other + first.sum() * 0, k_cache, plan=plan, reuse_ids=True)
        return first * 2, second, lse

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    index = {name: tensor for name, tensor in given.items() if name not in ("q", "k_cache")}
    with pytest.raises(GuardError, match=r"\[T-22\] reuse_ids: nothing was selected with this plan yet"):
        chain.decode_step(other, given["k_cache"], plan=plan, reuse_ids=True)
    for weights in (index["weights"], index["weights"].neg()):
        changed = {**index, "weights": weights}
        want = run(eager, given["q"], given["k_cache"], other, changed)
        found = compiled(plan, given["q"], given["k_cache"], other, changed)
        for mine, theirs in zip(found, want, strict=True):
            assert mine.equal(theirs)
        assert plan.ids.equal(eager.ids) and plan.counts.equal(eager.counts)
    chain.decode_step(other, given["k_cache"], plan=plan, reuse_ids=True)
    with pytest.raises(Exception, match="made for batch 1, next_n 2, which q does not have"):
        compiled(plan, given["q"][:, :1], given["k_cache"], other, index)


def test_layers_of_both_levels_compile_as_one_graph(levels: dsagen.Kernels) -> None:
    """V4.1: one layer chooses blocks, one attends to what it selected, one selects inside of the blocks."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"k": K, "window": TOPK, "determinism": "order", "candidate_blocks": SLOTS}
    plan, eager = (levels.plan_decode_step(1, 2, PAGES * PAGE, **options) for _ in range(2))
    given = levels_call()
    caches = {name: given.pop(name) for name in ("q", "k_cache", "extra_k_cache", "indices")}

    def run(plan: Any, caches: dict[str, Tensor], first: dict[str, Tensor], other: dict[str, Tensor]) -> Any:
        choosing, _ = levels.decode_step(**caches, plan=plan, candidates="choose", **first)
        again, _ = levels.decode_step(**caches, plan=plan, reuse_ids=True)
        using, lse = levels.decode_step(**caches, plan=plan, candidates="use", **other)
        return choosing * 2, again, using, lse

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for sign in (1, -1):
        first = {**given, "weights": given["weights"] * sign}
        other = {**given, "weights": given["weights"].flip(1) * sign}
        want = run(eager, caches, first, other)
        for mine, theirs in zip(compiled(plan, caches, first, other), want, strict=True):
            assert mine.equal(theirs)
        assert plan.ids.equal(eager.ids) and plan.counts.equal(eager.counts)
        assert plan.candidates.blocks.equal(eager.candidates.blocks) and plan.candidates.is_chosen
        assert plan.candidates.pages.equal(eager.candidates.pages) and not want[0].equal(want[2] * 2)


def test_a_compiled_call_takes_the_plans_splits_and_given_outputs(all_kernels: dict[str, dsagen.Kernels]) -> None:
    torch._dynamo.reset()
    decode = all_kernels["decode"]
    plan = decode.plan_sparse_decode(2, 1, TOPK, num_splits=1)
    given = outputs()
    compiled = torch.compile(step(all_kernels, plan, **given), fullgraph=True, backend="aot_eager")
    inputs = step_inputs()
    compiled(*inputs)
    want = decode.sparse_decode(inputs[0], inputs[1], OPS.topk(inputs[4], all_kernels["select"].handle, TOPK,
                                                              determinism="order")[:, None], plan=plan)  # fmt: skip
    assert given["out"].equal(want[0]) and given["lse"].equal(want[1])
    given["out"].zero_()
    torch._dynamo.reset()
    torch.compile(step(all_kernels, plan, out=given["out"]), fullgraph=True, backend="aot_eager")(*inputs)
    assert given["out"].equal(want[0])
    with pytest.raises(Exception, match="made for batch 2, s_q 1, topk 40, extra_topk 0, which"):
        compiled(*step_inputs(3))


def test_dynamic_batches_compile_once(decode: dsagen.Kernels) -> None:
    torch._dynamo.reset()
    compiles = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(graph)
        return graph

    compiled = torch.compile(
        lambda a, b, c: decode.sparse_decode(a, b, c), fullgraph=True, backend=backend, dynamic=True
    )
    cache = pool()
    for batch in (2, 3, 4):
        call = (q(batch), cache, ids(batch))
        out, lse = compiled(*call)
        want = decode.sparse_decode(*call)
        assert out.equal(want[0]) and lse.equal(want[1])
    assert len(compiles) == 1


def test_export_keeps_the_op(decode: dsagen.Kernels) -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: Tensor, cache: Tensor, picked: Tensor) -> Tensor:
            return decode.sparse_decode(query, cache, picked)[0]

    call = (q(), pool(), ids())
    program = torch.export.export(Attention(), call)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "dsagen.sparse_decode.default" in targets
    assert program.module()(*call).equal(decode.sparse_decode(*call)[0])


def test_fake_tensors_give_shapes_and_launch_nothing(all_kernels: dict[str, dsagen.Kernels]) -> None:
    for op in SCHEMAS:
        kernels, arguments = CALLS[op]
        positional, named = arguments(all_kernels[kernels].handle)
        real = getattr(OPS, op)(*positional, **named)
        count = len(LAUNCHES)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in positional]
            more = {n: mode.from_tensor(value) if isinstance(value, Tensor) else value for n, value in named.items()}
            fake = getattr(OPS, op)(*fakes, **more)
        assert len(LAUNCHES) == count
        for got, want in zip(*((x if isinstance(x, tuple) else (x,)) for x in (fake, real)), strict=True):
            if want is not None:
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def test_grad_is_refused_eager_and_traced(all_kernels: dict[str, dsagen.Kernels]) -> None:
    torch._dynamo.reset()
    decode, select = all_kernels["decode"], all_kernels["select"]
    query = q().requires_grad_()
    with pytest.raises(GuardError, match=r"\[T-02\] q: requires grad"):
        OPS.sparse_decode(query, pool(), ids(), decode.handle)
    with pytest.raises(GuardError, match=r"\[T-02\] scores: requires grad"):
        OPS.topk(torch.randn(2, 50, requires_grad=True), select.handle, K)
    compiled = torch.compile(lambda a, b, c: decode.sparse_decode(a, b, c), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"\[T-02\] an input: requires grad"):
        compiled(query, pool(), ids())


def test_a_subclass_reaches_no_kernel(decode: dsagen.Kernels) -> None:
    class Subclass(Tensor):
        pass

    count = len(LAUNCHES)
    with pytest.raises(GuardError, match=r"\[T-01\] q: Subclass is a tensor subclass"):
        OPS.sparse_decode(q().as_subclass(Subclass), pool(), ids(), decode.handle)
    assert len(LAUNCHES) == count


def test_a_handle_names_kernels_of_its_spec(decode: dsagen.Kernels, store: None) -> None:
    assert re.fullmatch(r"v32_h16-[0-9a-f]+#\d+", decode.handle)
    again = load("v32_h16")
    assert again.handle.rsplit("#", 1)[0] == decode.handle.rsplit("#", 1)[0] and again.handle != decode.handle
    call = (q(), pool(), ids())
    want = OPS.sparse_decode(*call, again.handle)[0]
    handle = again.handle
    del again
    # Code that was compiled with it means kernels of this spec, whichever they are.
    assert OPS.sparse_decode(*call, handle)[0].equal(want)
    other = handle.replace("v32_h16-", "v32_h32-")
    with pytest.raises(GuardError, match=rf"\[T-19\] kernels: none that are loaded have the handle '{other}'"):
        OPS.sparse_decode(*call, other)
