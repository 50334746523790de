"""Tensors of calls of the indexer's logits, for what compares the launchers: every one that a call may bring."""

import torch

INDEXER, MX, CANDIDATES = "v32_indexer_h128", "v4_indexer_h64", "v41_indexer_candidates_h64"
_BATCH, _TOKENS, _HEADS = 2, 2, 64


def _ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def _codes(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


def logits_tensors():
    """Of keys in pages, for MX."""
    rows = _BATCH * _TOKENS
    return {
        "q": _codes(_BATCH, _TOKENS, _HEADS, 64),
        "k_cache": _codes(5, 16, 1, 68),
        "weights": torch.zeros(rows, _HEADS),
        "context_lens": _ints(_BATCH, _TOKENS),
        "block_table": _ints(_BATCH, 4),
        "q_scales": _ints(_BATCH, _TOKENS, _HEADS),
        "out": torch.zeros(rows, 40),
    }


def fp8_logits_tensors():
    """The same for INDEXER, whose queries have no scales."""
    fp8 = {"q": _codes(_BATCH, _TOKENS, _HEADS, 128), "k_cache": _codes(5, 16, 1, 132)}
    return {name: tensor for name, tensor in {**logits_tensors(), **fp8}.items() if name != "q_scales"}


def ragged_tensors():
    """Of keys in one piece, for MX."""
    return {
        "q": _codes(4, _HEADS, 64),
        "keys": _codes(40, 64),
        "key_scales": _ints(40),
        "weights": torch.zeros(4, _HEADS),
        "starts": _ints(4),
        "ends": _ints(4),
        "q_scales": _ints(4, _HEADS),
        "out": torch.zeros(4, 40),
    }


def block_tensors():
    """With scores of candidate blocks, for CANDIDATES."""
    rows = _BATCH * _TOKENS
    of_pages = {name: tensor for name, tensor in candidate_tensors_of_pages().items() if name != "candidate_blocks"}
    return {**of_pages, "block_scores": torch.zeros(rows, 5), "block_counts": _ints(rows)}


def candidate_tensors_of_pages():
    """Of keys in candidate blocks, for CANDIDATES."""
    rows = _BATCH * _TOKENS
    return {
        **logits_tensors(),
        "q": _codes(_BATCH, _TOKENS, 32, 64),
        "weights": torch.zeros(rows, 32),
        "q_scales": _ints(_BATCH, _TOKENS, 32),
        "candidate_blocks": _ints(rows, 5),
        "out": torch.zeros(rows, 40),
    }
