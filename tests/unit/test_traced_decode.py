"""Which op of torch a traced call of sparse decode is."""

import pytest
import torch
from native_driver import COMPILER, NativeFakeDriver
from test_native_launcher import CALLS, make

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
