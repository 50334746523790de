"""The stand-ins for deep_gemm, sgl_kernel and flashinfer on a device: deployments that calls imply, and captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.indexer_inputs import make_inputs
from dsagen.check.run import device_problem
from dsagen.compat import deep_gemm, deep_gemm_legacy, flashinfer, sgl_kernel
from dsagen.compat.logits import INDEXERS
from dsagen.compat.selection import SELECTIONS
from dsagen.families.indexer_logits.reference import logits_reference
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.spec import load_spec

pytestmark = pytest.mark.gpu

ROWS, WIDTH, K = 6, 9000, 2048


@pytest.fixture(autouse=True)
def needs_device() -> Iterator[None]:
    """Nothing is given to use(), so deployments are derived."""
    problem = device_problem(load_spec("v32_topk_h128"))
    if problem:
        pytest.skip(problem)
    yield
    SELECTIONS.forget()
    INDEXERS.forget()


def require_sets(found: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(found.long().sort(1).values, want.sort(1).values)


def test_top_k_eager_and_captured() -> None:
    scores = torch.randn(ROWS, WIDTH, device="cuda")
    lengths = torch.tensor([0, 100, 2048, 5000, 8999, 9000], device="cuda", dtype=torch.int32)
    table = torch.randperm(ROWS * 141, device="cuda").int().view(ROWS, 141)
    offsets = torch.arange(ROWS, device="cuda", dtype=torch.int32) * WIDTH
    flat = torch.randperm(ROWS * WIDTH, device="cuda").int().view(ROWS, WIDTH)
    pages = torch.zeros(ROWS, K, device="cuda", dtype=torch.int32)
    requests = torch.arange(ROWS + 1, device="cuda", dtype=torch.int32)

    def calls() -> list[torch.Tensor]:
        sgl_kernel.deepseek_v4_topk_transform_512(scores, lengths, table, pages, 64)
        return [
            sgl_kernel.fast_topk_v2(scores, lengths, K),
            sgl_kernel.fast_topk_transform_fused(scores, lengths, flat, requests, K),
            sgl_kernel.fast_topk_transform_ragged_fused(scores, lengths, offsets, K),
            flashinfer.top_k_page_table_transform(scores, table, lengths, K, page_size=64),
            flashinfer.top_k_ragged_transform(scores, offsets, lengths, K),
            pages,
        ]

    def require_right(found: list[torch.Tensor]) -> None:
        indices, _ = topk_reference(scores, K, lengths=lengths)
        paged = translate_reference(indices, page_table=table, page_size=64)
        moved = translate_reference(indices, offsets=offsets)
        looked_up = translate_reference(indices, page_table=flat)
        for ids, want in zip(found, (indices, looked_up, moved, paged, moved, paged), strict=True):
            require_sets(ids, want)

    require_right(calls())
    require_right(captured(calls, lambda: scores.copy_(torch.randn_like(scores))))


def test_paged_logits_eager_and_captured() -> None:
    case = LogitsCase("drop_in", 4, 2, 3000, pad_bytes=192)
    spec = load_spec("v32_indexer_h128")
    assert spec.index is not None
    draw = torch.Generator("cuda").manual_seed(2)
    inputs = make_inputs(case, index_format("fp8"), spec.index, draw)
    q, *others = inputs.tensors
    meta = deep_gemm.get_paged_mqa_logits_metadata(inputs.context_lens, 64, deep_gemm.get_num_sms())

    def calls() -> list[torch.Tensor]:
        return [
            deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *others, meta, 3000),
            deep_gemm_legacy.fp8_paged_mqa_logits(q, *others, meta, 3000),
            deep_gemm_legacy.fp8_paged_mqa_logits(q, *others, meta, 3000, True),
        ]

    def require_right(found: list[torch.Tensor]) -> None:
        want, scored = logits_reference(*inputs.tensors, index_format("fp8"), 3000)
        for logits in found:
            assert torch.equal(logits[scored], want[scored].float())
        assert bool((found[-1][~scored] == -torch.inf).all())

    require_right(calls())
    again = make_inputs(case, index_format("fp8"), spec.index, draw)
    require_right(captured(calls, lambda: inputs.copy_from(again)))


def captured(calls: Callable[[], list[torch.Tensor]], change: Callable[[], object]) -> list[torch.Tensor]:
    """What a replay gives once inputs have changed in place; the stream has seen the calls before, as engines do."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    with torch.cuda.graph(graph, stream=stream):
        found = calls()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return found
