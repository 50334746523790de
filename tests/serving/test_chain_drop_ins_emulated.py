"""The stand-ins for deep_gemm, sgl_kernel and flashinfer on the emulator, held to references of what those promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dsagen
from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.indexer_inputs import make_inputs
from dsagen.compat import deep_gemm, deep_gemm_legacy, flashinfer, sgl_kernel
from dsagen.compat.logits import INDEXERS
from dsagen.compat.selection import SELECTIONS
from dsagen.families.indexer_logits.reference import logits_reference
from dsagen.index_format import index_format
from dsagen.runtime.emulated import EmulatorOptions

pytestmark = pytest.mark.compile

ROWS, WIDTH, K = 5, 700, 64
SPEC = {
    "model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits", "topk"],
    "index": {"heads": 32, "forms": ["paged", "ragged"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def served(shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    kernels = dsagen.load(SPEC, device="emulator", emulator=EmulatorOptions(races=False))
    SELECTIONS.use(kernels)
    INDEXERS.use(kernels)
    yield
    SELECTIONS.forget()
    INDEXERS.forget()


@pytest.fixture(scope="module")
def rows() -> dict[str, torch.Tensor]:
    """Rows of few distinct scores, whose boundary is a tie; windows of 0, fewer than K, K and more scores."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 40, (ROWS, WIDTH), generator=generator).float()
    lengths = torch.tensor([0, 20, K, 300, 500], dtype=torch.int32)
    starts = torch.tensor([3, 0, 100, 200, 0], dtype=torch.int32)
    return {"scores": scores, "lengths": lengths, "starts": starts}


def best(rows: dict[str, torch.Tensor], with_starts: bool) -> list[list[int]]:
    """Indices of the K largest of each window, from its start, equal ones by index, by Python's sort."""
    found = []
    for row in range(ROWS):
        first = int(rows["starts"][row]) if with_starts else 0
        window = rows["scores"][row, first : first + int(rows["lengths"][row])].tolist()
        found.append(sorted(range(len(window)), key=lambda i, w=window: (-w[i], i))[:K])
    return found


def require_sets(ids: torch.Tensor, want: list[list[int]]) -> None:
    """Each row holds what is wanted at its front, in any order, and -1 behind it."""
    for row, expected in zip(ids.tolist(), want, strict=True):
        assert sorted(row[: len(expected)]) == sorted(expected)
        assert row[len(expected) :] == [-1] * (len(row) - len(expected))


@pytest.mark.parametrize("with_starts", [False, True])
def test_sgl_kernel(rows: dict[str, torch.Tensor], with_starts: bool) -> None:
    scores, lengths, starts = rows["scores"], rows["lengths"], rows["starts"] if with_starts else None
    want = best(rows, with_starts)
    require_sets(sgl_kernel.fast_topk_v2(scores, lengths, K, starts), want)
    # A row that is taken whole is the identity.
    assert sgl_kernel.fast_topk_v2(scores, lengths, K, starts)[1, :20].tolist() == list(range(20))
    table = torch.randperm(ROWS * WIDTH).int().view(ROWS, WIDTH)
    decode = sgl_kernel.fast_topk_transform_fused(scores, lengths, table, torch.arange(ROWS + 1).int(), K, starts)
    require_sets(decode, [[int(table[row, i]) for i in ids] for row, ids in enumerate(want)])
    requests = [0, 0, 0, 1, 2]
    prefill = sgl_kernel.fast_topk_transform_fused(
        scores, lengths, table[:3], torch.tensor([0, 3, 4, 5]).int(), K, starts
    )
    require_sets(prefill, [[int(table[requests[row], i]) for i in ids] for row, ids in enumerate(want)])
    offsets = torch.tensor([0, 1000, 2000, 3000, 4000]).int()
    ragged = sgl_kernel.fast_topk_transform_ragged_fused(scores, lengths, offsets, K, starts)
    require_sets(ragged, [[int(offsets[row]) + i for i in ids] for row, ids in enumerate(want)])


@pytest.mark.parametrize("ordered", [False, True])
def test_deepseek_v4_transform(rows: dict[str, torch.Tensor], ordered: bool) -> None:
    size, want = 64, best(rows, False)
    table = torch.randperm(ROWS * 11).int().view(ROWS, 11)
    pages, raw = torch.zeros(ROWS, K, dtype=torch.int32), torch.zeros(ROWS, K, dtype=torch.int32)
    given = rows["scores"], rows["lengths"], table, pages, size, raw
    assert sgl_kernel.deepseek_v4_topk_transform_512(*given, ordered) is None
    require_sets(raw, want)
    require_sets(pages, [[int(table[row, i // size]) * size + i % size for i in ids] for row, ids in enumerate(want)])
    if ordered:
        assert all(row[: len(ids)] == sorted(ids) for row, ids in zip(raw.tolist(), want, strict=True))


def test_flashinfer(rows: dict[str, torch.Tensor]) -> None:
    scores, lengths, starts = rows["scores"], rows["lengths"], rows["starts"]
    table, batch = torch.randperm(3 * 100).int().view(3, 100), torch.tensor([2, 0, 1, 1, 2]).int()
    firsts, want = torch.tensor([0, 7, 50, 60, 1]).int(), best(rows, True)
    out, raw = torch.zeros(ROWS, K).int(), torch.zeros(ROWS, K).int()
    ids = flashinfer.top_k_page_table_transform(
        scores, table, lengths, K, batch, True, row_starts=starts, page_table_row_starts=firsts, page_size=8, out=out,
        out_raw_indices=raw,
    )  # fmt: skip
    assert ids is out

    def entry(row: int, index: int) -> int:
        return int(table[batch[row], firsts[row] + index // 8]) * 8 + index % 8

    assert [row[: len(ids)] for row, ids in zip(raw.tolist(), want, strict=True)] == [sorted(ids) for ids in want]
    require_sets(ids, [[entry(row, i) for i in indices] for row, indices in enumerate(want)])
    # Pages of one: a row's window begins at the same place of its table.
    flat = torch.randperm(ROWS * WIDTH).int().view(ROWS, WIDTH)
    ids = flashinfer.top_k_page_table_transform(scores, flat, lengths, K, row_starts=starts)
    require_sets(ids, [[int(flat[row, starts[row] + i]) for i in indices] for row, indices in enumerate(want)])
    offsets = torch.arange(ROWS).int() * 700
    ids = flashinfer.top_k_ragged_transform(scores, offsets, lengths, K, tie_break=1, row_starts=starts)
    require_sets(ids, [[row * 700 + i for i in indices] for row, indices in enumerate(want)])


@pytest.mark.parametrize("generation", ["newer", "older", "older pair", "clean"])
def test_deep_gemm(generation: str) -> None:
    case = LogitsCase("drop_in", 3, 2, 200, page_size=64, pad_bytes=192)
    inputs = make_inputs(case, index_format("fp8"), dsagen.load(SPEC, device="emulator").spec.index,
                         torch.Generator().manual_seed(9))  # fmt: skip
    q, *others = inputs.tensors
    meta = deep_gemm.get_paged_mqa_logits_metadata(inputs.context_lens, 64, deep_gemm.get_num_sms())
    if generation == "newer":
        logits = deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *others, meta, 200)
    elif generation == "older pair":
        logits = deep_gemm_legacy.fp8_fp4_paged_mqa_logits((q, None), *others, meta, 200)
    else:
        logits = deep_gemm_legacy.fp8_paged_mqa_logits(q, *others, meta, 200, generation == "clean")
    want, scored = logits_reference(*inputs.tensors, index_format("fp8"), 200)
    assert (logits.shape, logits.stride(), logits.dtype) == ((6, 200), (256, 1), torch.float32)
    assert torch.equal(logits[scored], want[scored].float())
    if generation == "clean":
        assert bool((logits[~scored] == -torch.inf).all())


@pytest.mark.parametrize("compressed", [False, True])
def test_deep_gemm_of_ragged_windows(compressed: bool) -> None:
    draw = torch.Generator().manual_seed(8)
    codes = torch.randint(-4, 5, (120, 32 + 1, 128), generator=draw).float().to(torch.float8_e4m3fn)
    q, keys, weights = codes[:7, :32], codes[:, 32], torch.randint(-3, 4, (7, 32), generator=draw).float()
    scales = torch.randint(-1, 2, (120,), generator=draw).float().exp2()
    starts, ends = torch.tensor([0, 0, 5, 119, 60, 3, 0]).int(), torch.tensor([0, 120, 70, 120, 64, 4, 65]).int()
    want = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q.float(), keys.float()).relu()) * scales
    given = (keys.contiguous(), scales), weights, starts, ends
    width = 120 if not compressed else int((ends - starts).max())
    found = deep_gemm_legacy.fp8_mqa_logits(q, *given, True, width if compressed else 0)
    expected = torch.full((7, width), -torch.inf)
    for row, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        at = 0 if compressed else first
        expected[row, at : at + last - first] = want[row, first:last]
    assert torch.equal(found, expected)
    if compressed:
        newer = deep_gemm.fp8_fp4_mqa_logits((q, None), *given, width)
        scored = expected > -torch.inf
        assert torch.equal(newer[scored], expected[scored])


def test_deep_gemm_of_fp4_keys() -> None:
    kernels = dsagen.load({**SPEC, "index": {"heads": 32, "keys": "mxfp4"}}, device="emulator")
    INDEXERS.use(kernels)
    inputs = make_inputs(
        LogitsCase("drop_in", 2, 2, 150), index_format("mxfp4"), kernels.spec.index, torch.Generator().manual_seed(9)
    )
    q, *others = inputs.tensors
    meta = deep_gemm.get_paged_mqa_logits_metadata(inputs.context_lens, 64, 132)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((q, inputs.q_scales), *others, meta, 150)
    want, scored = logits_reference(*inputs.tensors, index_format("mxfp4"), 150, **inputs.named)
    assert torch.equal(logits[scored], want[scored].float())
