"""A call of each op of torch: small tensors, and the kernels that it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEADS, TOPK, PAGES, PAGE, K, SLOTS = 16, 40, 3, 16, 8, 3


def q(batch: int = 2) -> Tensor:
    return torch.randn(batch, 1, HEADS, 576).bfloat16()


def pool() -> Tensor:
    """Rows of small codes, scales of one and rotary dims of one, so that every value is finite."""
    cache = torch.randint(0, 56, (PAGES, PAGE, 1, 656), dtype=torch.uint8)
    cache[..., 512:528].view(torch.float32).fill_(1.0)
    cache[..., 528:].view(torch.bfloat16).fill_(1.0)
    return cache


def ids(batch: int = 2) -> Tensor:
    return torch.randint(-1, PAGES * PAGE, (batch, 1, TOPK), dtype=torch.int32)


def outputs(batch: int = 2) -> dict[str, Tensor]:
    out = torch.zeros(batch, 1, HEADS, 512, dtype=torch.bfloat16)
    return {"out": out, "lse": torch.zeros(batch, 1, HEADS).transpose(1, 2)}


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp8_keys() -> Tensor:
    """Keys of small codes and scales of one."""
    pool = torch.randint(0, 56, (PAGES, PAGE * 132), dtype=torch.uint8)
    pool[:, PAGE * 128 :].view(torch.float32).fill_(1.0)
    return pool.view(PAGES, PAGE, 1, 132)


def one_request() -> tuple[Tensor, Tensor]:
    """A block table, and where the rows of a request of four keys begin and end."""
    return lengths(2, 0)[None], lengths(0, 4)


def rows(count: int, dims: int = 576) -> Tensor:
    return torch.randn(count, dims).bfloat16()


def fp4(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def ones(*shape: int) -> Tensor:
    """Words of scales of 1."""
    return torch.full(shape, 0x7F7F7F7F, dtype=torch.int32)


def index_pool() -> Tensor:
    cache = fp4(PAGES, PAGE, 1, 68)
    cache.view(PAGES, -1)[:, PAGE * 64 :] = 127
    return cache


def logits_call(batch: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Keys in pages: rows of 41 columns, which lie apart."""
    table = torch.arange(batch * PAGES, dtype=torch.int32).view(batch, PAGES) % PAGES
    tensors = (fp4(batch, 1, 64, 64), index_pool(), torch.randn(batch, 64), lengths(*range(40, 40 - batch, -1)), table)
    return tensors, {"q_scales": ones(batch, 1, 64), "max_seq_len": 41, "fill_neg_inf": True}


def ragged_call(tokens: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    first, last = lengths(*range(tokens)), lengths(*range(30, 30 + tokens))
    tensors = (fp4(tokens, 64, 64), fp4(37, 64), ones(37), torch.randn(tokens, 64), first, last)
    return tensors, {"q_scales": ones(tokens, 64), "fill_neg_inf": True}


def candidates_call() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    (_, pool_of_keys, _, seen, table), _ = logits_call()
    blocks = torch.tensor([[1, -1, 0], [3, 0, -1]], dtype=torch.int32)
    tensors = (fp4(2, 1, 32, 64), pool_of_keys, torch.randn(2, 32), seen, table, blocks)
    return tensors, {"q_scales": ones(2, 1, 32)}


def blocks_call() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    (_, *others, _), options = candidates_call()
    return (fp4(2, 1, 32, 64), *others), {**options, "max_seq_len": 41, "fill_neg_inf": True}


def chain_call() -> dict[str, Tensor]:
    """Two tokens of one request, of which the last one sees all keys."""
    return {
        "q": torch.randn(1, 2, HEADS, 576).bfloat16(),
        "k_cache": pool(),
        "index_q": torch.randint(0, 56, (1, 2, 64, 128), dtype=torch.uint8),
        "index_cache": fp8_keys(),
        "weights": torch.randn(2, 64),
        "context_lens": lengths(5, PAGES * PAGE)[None],
        "block_table": lengths(2, 0, 1)[None],
    }


def chain_results() -> dict[str, Tensor]:
    out, lse = torch.zeros(1, 2, HEADS, 512, dtype=torch.bfloat16), torch.zeros(1, 2, HEADS).transpose(1, 2)
    return {"out": out, "lse": lse, "ids": lengths(*range(2 * K)).view(1, 2, K), "counts": lengths(0, 0)[None]}


def with_handle(
    made: tuple[tuple[Tensor, ...], dict[str, Any]], handle: str, **more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors, options = made
    return (*tensors, handle), {**options, **more}


def levels_call() -> dict[str, Tensor]:
    """A step of two tokens over two caches and MXFP4 keys, as the op takes it: what is required, and the window."""
    tables = torch.arange(PAGES, dtype=torch.int32)[None]
    window = torch.randint(0, 56, (PAGES, PAGE, 1, 528), dtype=torch.uint8)
    window[..., 512:] = 127
    selected = fp4(PAGES, PAGE, 1, 288)
    selected[..., 256:] = 0x38
    return {
        "q": torch.randn(1, 2, HEADS, 512).bfloat16(),
        "k_cache": window,
        "index_q": fp4(1, 2, 32, 64),
        "index_cache": index_pool(),
        "weights": torch.randn(2, 32),
        "context_lens": lengths(PAGES * PAGE - 5, PAGES * PAGE)[None],
        "block_table": tables,
        "index_q_scales": ones(1, 2, 32),
        "indices": torch.randint(-1, PAGES * PAGE, (1, 2, TOPK), dtype=torch.int32),
        "extra_k_cache": selected,
    }


def of_levels(handle: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op that chooses or uses candidate blocks, which are the first ones ahead."""
    given = levels_call()
    names = ("q", "k_cache", "index_q", "index_cache", "weights", "context_lens", "block_table")
    required = [given.pop(name) for name in names]
    blocks = torch.arange(SLOTS, dtype=torch.int32).repeat(2, 1)
    named = {**given, "determinism": "order"}
    return (*required, handle, PAGES * PAGE, K, *chain_results().values(), blocks, blocks.clone()), named


# Op: (kernels, arguments of a call).
CALLS: dict[str, tuple[str, Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "sparse_decode": ("decode", lambda h: ((q(), pool(), ids(), h), {"topk_length": lengths(40, 7)})),
    "sparse_decode_out": (
        "decode",
        lambda h: ((q(), pool(), ids(), h, *outputs().values(), None, torch.zeros(HEADS), 0.1, 1), {}),
    ),
    "sparse_decode_caches": ("decode", lambda h: ((q(), pool(), ids(), h), {"extra_k_cache": None})),
    "sparse_decode_caches_out": ("decode", lambda h: ((q(), pool(), ids(), h, *outputs().values()), {"v_cache": None})),
    "topk": ("select", lambda h: ((torch.randn(2, 50), h, K), {"lengths": lengths(50, 3)})),
    "topk_out": (
        "select",
        lambda h: (
            (torch.randn(2, 50), h, K),
            {"out": torch.zeros(2, K, dtype=torch.int32), "counts": lengths(0, 0), "raw": None},
        ),
    ),
    "indexer_logits": ("indexer", lambda h: with_handle(logits_call(), h)),
    "indexer_logits_out": ("indexer", lambda h: with_handle(logits_call(), h, out=torch.zeros(2, 41))),
    "indexer_logits_blocks": ("candidates", lambda h: with_handle(blocks_call(), h)),
    "indexer_logits_blocks_out": (
        "candidates",
        lambda h: with_handle(
            blocks_call(), h, out=torch.zeros(2, 41), block_scores=torch.zeros(2, 6), block_counts=lengths(0, 0)
        ),
    ),
    "indexer_logits_ragged": ("indexer", lambda h: with_handle(ragged_call(), h)),
    "indexer_logits_ragged_out": (
        "indexer",
        lambda h: with_handle(ragged_call(), h, out=torch.zeros(2, 32), max_window=32),
    ),
    "indexer_logits_candidates": ("candidates", lambda h: with_handle(candidates_call(), h)),
    "indexer_logits_candidates_out": (
        "candidates",
        lambda h: with_handle(candidates_call(), h, out=torch.zeros(2, 48), block_size=16),
    ),
    "decode_step": (
        "chain",
        lambda h: ((*chain_call().values(), h, PAGES * PAGE, K), {"determinism": "order", "overlap": False}),
    ),
    "decode_step_out": (
        "chain",
        lambda h: ((*chain_call().values(), h, PAGES * PAGE, K, *chain_results().values()), {"determinism": "order"}),
    ),
    "decode_step_choose_out": ("levels", lambda h: of_levels(h)),
    "decode_step_use_out": ("levels", lambda h: of_levels(h)),
    "kv_write": ("caches", lambda h: ((rows(3), pool(), lengths(5, -1, 40), h), {})),
    "kv_read": ("caches", lambda h: ((pool(), h), {"slots": lengths(5, -1, 40)})),
    "kv_read_out": ("caches", lambda h: ((pool(), h), {"slots": lengths(1, 2), "out": rows(2)})),
    "kv_convert": (
        "v41",
        lambda h: (
            (torch.randint(0, 99, (2, 4, 1, 528)).byte(), torch.zeros(3, 4, 1, 528, dtype=torch.uint8), h),
            {"source_slots": lengths(0, 7), "target_slots": lengths(3, 11)},
        ),
    ),
    "index_write": ("index", lambda h: ((rows(3, 128), fp8_keys(), lengths(5, -1), h), {})),
    "index_gather": ("index", lambda h: ((fp8_keys(), h, *one_request(), 5), {"token_starts": lengths(3)})),
    "index_gather_out": (
        "index",
        lambda h: (
            (fp8_keys(), h, *one_request(), 5),
            {"codes": torch.zeros(5, 128, dtype=torch.uint8), "scales": torch.zeros(5)},
        ),
    ),
}
