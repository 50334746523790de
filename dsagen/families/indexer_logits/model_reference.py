"""The model's side of the indexer in torch: from projections of activations to what is scored and what is cached.

    keys     norm -> rotation of 64 dims -> Hadamard transform, where the model has one     then cached, quantised
    queries          rotation of 64 dims -> Hadamard transform, where the model has one     then quantised
    weights  projection x heads^-0.5 x dim^-0.5, and x the scale of each query where that is one number

Each stage computes in fp32 and rounds once to the dtype of its input, as models hand bf16 from stage to stage; fp64
stays fp64. What is projected (wq_b, wk, weights_proj), and for V4 compressed, comes from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from dsagen.families.index_cache.reference import quantise_keys
from dsagen.index_format import IndexFormat


class Norm(StrEnum):
    """How keys are normalised."""

    LAYER = "layer"  # mean and variance, with weight and bias
    RMS = "rms"  # the root of the mean square, with weight


@dataclass(frozen=True)
class IndexerStyle:
    """What models do differently. `rope_dims` are the first dims of a head, or the last ones.

    `interleaved` pairs neighbours in the rotation, else dim i of the first half goes with dim i of the second. `eps` of
    the norm is None where no public text fixes it: then the caller gives it.
    """

    norm: Norm
    eps: float | None
    rope_first: bool
    interleaved: bool
    hadamard: bool
    rope_dims: int = 64


# DeepSeek's first public demo of V3.2 rotated its indexer interleaved; the model was trained half-split.
STYLES: Mapping[str, IndexerStyle] = {
    "v32": IndexerStyle(Norm.LAYER, 1e-6, rope_first=True, interleaved=False, hadamard=True),
    "glm5": IndexerStyle(Norm.LAYER, 1e-6, rope_first=True, interleaved=True, hadamard=True),
    # Keys are the compressor's, one for four tokens.
    "v4": IndexerStyle(Norm.RMS, None, rope_first=False, interleaved=True, hadamard=True),
    # Keys are of the shared latent before its own rotation.
    "v41": IndexerStyle(Norm.RMS, 1e-20, rope_first=False, interleaved=True, hadamard=False),
}


class IndexQueries(NamedTuple):
    """Queries as `indexer_logits` takes them, with their weights.

    codes [tokens, heads, bytes of dim codes]; scales int32 words [tokens, heads] of a block-scaled format, else None:
    they are in the weights, fp32 [tokens, heads].
    """

    codes: Tensor
    scales: Tensor | None
    weights: Tensor


def rope_angles(positions: Tensor, rope_dims: int, base: float) -> Tensor:
    """fp64 [tokens, rope_dims / 2] angles of int positions [tokens]: position x base^(-2 i / rope_dims).

    A compressed key stands at the position of its group's first token. Scaled frequencies (YaRN) are the model's: any
    angles of this shape will do.
    """
    steps = torch.arange(0, rope_dims, 2, dtype=torch.float64, device=positions.device)
    return positions.double()[:, None] * base ** (-steps / rope_dims)


def index_keys(
    style: IndexerStyle, x: Tensor, angles: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Keys [tokens, dim] as they are cached, from x [tokens, dim]: projected, or of V4 compressed. ValueError without
    an eps where the style has none, and for a bias that its norm has no use for, or lacks.
    """
    eps = style.eps if eps is None else eps
    if eps is None:
        raise ValueError("eps: missing, and no public text fixes that of this model: pass its configuration's")
    if (bias is None) == (style.norm is Norm.LAYER):
        raise ValueError(f"bias: a {style.norm} norm has {'one' if bias is None else 'none'}")
    return _turned(style, _normalised(style.norm, x, weight, bias, eps), angles)


def index_queries(
    style: IndexerStyle, record: IndexFormat, rule_id: str, q: Tensor, angles: Tensor, weights: Tensor
) -> IndexQueries:
    """Queries and weights of projections q [tokens, heads, dim] and weights [tokens, heads], by a rule of the keys'
    format.
    """
    tokens, heads, dim = q.shape
    turned = _turned(style, q, angles[:, None])
    codes, words = quantise_keys(record, turned.flatten(0, 1).float(), rule_id)
    codes = codes.view(tokens, heads, -1)
    if record.is_block_scaled:
        scales = words.contiguous().view(torch.int32).view(tokens, heads)
        return IndexQueries(codes, scales, fold_weights(weights, dim))
    own = words.contiguous().view(torch.float32).view(tokens, heads)
    return IndexQueries(codes, None, fold_weights(weights, dim, own))


def fold_weights(weights: Tensor, dim: int, q_scales: Tensor | None = None) -> Tensor:
    """fp32 [tokens, heads]: projected weights x heads^-0.5 x dim^-0.5, x the queries' fp32 scales where they have one
    each, rounded once.
    """
    folded: Tensor = weights.double() * float((weights.shape[1] * dim) ** -0.5)
    return (folded if q_scales is None else folded * q_scales.double()).float()


def rotate(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """X [..., n] with each pair turned by its angle [..., n / 2]: (a, b) -> (a cos - b sin, a sin + b cos)."""
    wide = _wide(x)
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = a * cos - b * sin, a * sin + b * cos
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return joined.to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """X [..., n] times the n x n Hadamard matrix of Sylvester's order and n^-0.5, n a power of two.

    The matrix is symmetric and its rows are orthonormal: products of two vectors that both pass stay what they were.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"x: {n} dims, and a Hadamard matrix of Sylvester's order has a power of two")
    wide, half = _wide(x), 1
    while half < n:
        pairs = wide.reshape(*wide.shape[:-1], n // (2 * half), 2, half)
        wide = torch.stack((pairs.sum(-2), pairs[..., 0, :] - pairs[..., 1, :]), -2).reshape(x.shape)
        half *= 2
    return (wide * float(n**-0.5)).to(x.dtype)


def _turned(style: IndexerStyle, x: Tensor, angles: Tensor) -> Tensor:
    """Rotated in part, and transformed."""
    first = 0 if style.rope_first else x.shape[-1] - style.rope_dims
    last = first + style.rope_dims
    rope = rotate(x[..., first:last], angles, interleaved=style.interleaved)
    turned = torch.cat((x[..., :first], rope, x[..., last:]), -1)
    return hadamard(turned) if style.hadamard else turned


def _normalised(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = _wide(x)
    if norm is Norm.LAYER:
        assert bias is not None
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide.dtype)
    return (scaled if bias is None else scaled + bias.to(wide.dtype)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()
