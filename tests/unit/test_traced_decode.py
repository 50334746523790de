"""Traced calls on the recording driver: which op of torch they are, and that plans are looked at."""

import pytest
import torch
from native_driver import COMPILER, NativeFakeDriver
from test_native_launcher import BATCH, CALLS, DECODE, S_Q, TOPK, TOPK_SPEC, make

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.mark.parametrize(("name", "op"), [("decode two caches", "sparse_decode_caches"), ("decode", "sparse_decode")])
@pytest.mark.parametrize("drop", [(), ("out", "lse")])
def test_a_traced_call_is_the_op_that_takes_what_it_brings(name, op, drop):
    torch._dynamo.reset()
    driver, kernels = make(NativeFakeDriver, CALLS[name][0])
    called = []

    def backend(graph, _):
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    tensors = {key: value for key, value in CALLS[name][2]().items() if key not in drop}
    torch.compile(lambda tensors: kernels.sparse_decode(**tensors), fullgraph=True, backend=backend)(tensors)
    op = op if drop else f"{op}_out"
    assert [str(target) for target in called if "dsagen" in str(target)] == [f"dsagen.{op}"]
    assert driver.launches


def traced(call, **given):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="eager")(**given)


@pytest.mark.parametrize("wrong", ["number", "of others", "of another shape", "of another device"])
def test_a_traced_call_with_a_plan_that_is_not_its_own_is_refused(wrong):
    decode, others, select = (make(NativeFakeDriver, spec, registers)[1] for spec, registers in (
        (DECODE, 128), (DECODE, 128), (TOPK_SPEC, 60)))  # fmt: skip
    scores = torch.zeros(3, 131072)
    plans = {
        "number": (3, 3),
        "of others": (
            others.plan_sparse_decode(BATCH, S_Q, TOPK),
            make(NativeFakeDriver, TOPK_SPEC, 60)[1].plan_topk(3, 131072, 64),
        ),
        "of another device": (
            decode.plan_sparse_decode(*CALLS["decode few"][2]()["indices"].shape),
            select.plan_topk(3, 131072, 64),
        ),
        "of another shape": (decode.plan_sparse_decode(1, S_Q, TOPK), select.plan_topk(2, 131072, 64)),
    }
    said = {"of another shape": "made for", "of another device": "made for device cuda:1, .*cpu"}.get(
        wrong, "was not made by these kernels"
    )
    of_decode, of_topk = plans[wrong]
    if "device" in wrong:
        of_decode.device = of_topk.device = torch.device("cuda:1")
    with pytest.raises(Exception, match=rf"\[T-09\] plan: {said}"):
        traced(lambda **given: decode.sparse_decode(**given, plan=of_decode), **CALLS["decode few"][2]())
    with pytest.raises(Exception, match=rf"\[T-09\] plan: {said}"):
        traced(lambda scores: select.topk(scores, k=64, plan=of_topk), scores=scores)
    plan = select.plan_topk(3, 131072, 64)
    assert traced(lambda scores: select.topk(scores, k=64, plan=plan), scores=scores).shape == (3, 64)
    with pytest.raises(Exception, match=r"\[TK-\d+\] .*scores|\[T-\d+\] scores"):
        traced(lambda scores: select.topk(scores, k=64, plan=plan), scores=scores[0])
