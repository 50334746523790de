"""The model's side of the indexer against plain fp64 formulas, and against scores of what it gives."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsagen.check.cache_inputs import PoolShape
from dsagen.check.index_run import poisoned_cache
from dsagen.families.index_cache.reference import quantise_keys, write_reference
from dsagen.families.indexer_logits.model_reference import (
    STYLES,
    IndexQueries,
    fold_weights,
    hadamard,
    index_keys,
    index_queries,
    rope_angles,
    rotate,
)
from dsagen.families.indexer_logits.reference import read_keys, scaled_values
from dsagen.index_format import index_format
from dsagen.index_rule import default_index_rule, index_rules_of

HEADS, DIM, TOKENS = 8, 128, 6


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- Hadamard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 32, 64, 128])
def test_the_transform_is_the_matrix(n: int) -> None:
    """Entry (i, j) of Sylvester's matrix is -1 to the number of bits that i and j have both."""
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)], dtype=np.float64)
    matrix = torch.from_numpy(signs) * n**-0.5
    assert torch.allclose(matrix @ matrix, torch.eye(n, dtype=torch.float64), atol=1e-12)
    x = draw(5, n)
    assert torch.allclose(hadamard(x), x @ matrix, atol=1e-12)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-12)
    assert torch.allclose(hadamard(torch.eye(n, dtype=torch.float64)), matrix, atol=1e-12)


def test_the_transform_rounds_once_to_the_dtype_that_it_is_given() -> None:
    x = draw(7, 128).bfloat16()
    want = hadamard(x.double())
    found = hadamard(x)
    assert found.dtype is torch.bfloat16
    # fp32 sums of bf16 numbers are as good as exact here but for ties.
    assert (found.double() - want).abs().max() <= want.abs().max() * 2.0**-8
    assert (found != want.bfloat16()).float().mean() < 0.01
    with pytest.raises(ValueError, match="96 dims, and a Hadamard matrix of Sylvester's order has a power of two"):
        hadamard(torch.zeros(2, 96))


# ---- rotation -------------------------------------------------------------------------------------------------------


def test_angles_are_positions_times_powers_of_the_base() -> None:
    angles = rope_angles(torch.tensor([0, 1, 7]), 64, 10_000.0)
    assert angles.shape == (3, 32) and angles.dtype is torch.float64
    assert not angles[0].any() and angles[1, 0] == 1.0 and angles[2, 0] == 7.0
    assert angles[2, 5].item() == pytest.approx(7 * 10_000.0 ** (-10 / 64))


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_are_turned_as_complex_numbers(interleaved: bool) -> None:
    x, angles = draw(3, 8), rope_angles(torch.tensor([0, 2, 9]), 8, 100.0)
    found = rotate(x, angles, interleaved=interleaved)
    assert found[0].equal(x[0]), "position 0 is the identity"
    for row in range(3):
        for pair in range(4):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
            turned = complex(x[row, first], x[row, second]) * cmath.exp(1j * float(angles[row, pair]))
            assert found[row, first].item() == pytest.approx(turned.real, abs=1e-12)
            assert found[row, second].item() == pytest.approx(turned.imag, abs=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_distances_alone(interleaved: bool) -> None:
    q, k = draw(64, seed=2), draw(64, seed=3)

    def product(i: int, j: int) -> float:
        a, b = (rope_angles(torch.tensor([p]), 64, 10_000.0) for p in (i, j))
        turned = rotate(q[None], a, interleaved=interleaved) * rotate(k[None], b, interleaved=interleaved)
        return float(turned.sum())

    assert product(5, 3) == pytest.approx(product(105, 103), abs=1e-9)
    assert product(5, 3) != pytest.approx(product(6, 3), abs=1e-3)


def test_the_two_pairings_are_one_rotation_of_other_dims() -> None:
    x, angles = draw(4, 64), rope_angles(torch.arange(4), 64, 10_000.0)
    order = torch.arange(64).view(2, 32).t().flatten()
    half_split = rotate(x, angles, interleaved=False)
    assert rotate(x[:, order], angles, interleaved=True).equal(half_split[:, order])
    assert not rotate(x, angles, interleaved=True).equal(half_split)


# ---- keys -----------------------------------------------------------------------------------------------------------


def plain_key(name: str, x: list[float], weight: list[float], bias: list[float], position: int) -> list[float]:
    """A key in plain Python, step by step: of V3.2 and GLM-5 the first 64 dims turn, of V4 and V4.1 the last."""
    layer = name in ("v32", "glm5")
    mean = sum(x) / DIM if layer else 0.0
    size = math.sqrt(sum((v - mean) ** 2 for v in x) / DIM + (1e-6 if layer or name == "v4" else 1e-20))
    y = [(v - mean) / size * w + (b if layer else 0.0) for v, w, b in zip(x, weight, bias, strict=True)]
    start = 0 if layer else 64
    for pair in range(32):
        i, j = (start + pair, start + 32 + pair) if name == "v32" else (start + 2 * pair, start + 2 * pair + 1)
        turned = complex(y[i], y[j]) * cmath.exp(1j * position * 10_000.0 ** (-pair / 32))
        y[i], y[j] = turned.real, turned.imag
    if name == "v41":
        return y
    return [sum(y[i] * (-1) ** (i & j).bit_count() for i in range(DIM)) / math.sqrt(DIM) for j in range(DIM)]


@pytest.mark.parametrize("name", STYLES)
def test_keys_are_what_the_formulas_say(name: str) -> None:
    style = STYLES[name]
    x, weight, bias = draw(TOKENS, DIM, seed=4) + 0.5, 1 + 0.1 * draw(DIM, seed=5), 0.1 * draw(DIM, seed=6)
    positions = torch.tensor([0, 1, 17, 4, 1000, 5])
    options = {"bias": bias} if name in ("v32", "glm5") else {}
    eps = {"eps": 1e-6} if name == "v4" else {}
    angles = rope_angles(positions, 64, 10_000.0)
    found = index_keys(style, x, angles, weight, **options, **eps)
    for row in range(TOKENS):
        want = plain_key(name, x[row].tolist(), weight.tolist(), bias.tolist(), int(positions[row]))
        assert torch.allclose(found[row], torch.tensor(want, dtype=torch.float64), atol=1e-9)
    rounded = index_keys(style, x.bfloat16(), angles, weight, **options, **eps)
    assert rounded.dtype is torch.bfloat16
    assert (rounded.double() - found).abs().max() < 0.05 * found.abs().max()


def test_what_a_norm_needs_is_named() -> None:
    x, angles, weight = draw(2, DIM), rope_angles(torch.arange(2), 64, 1e4), torch.ones(DIM)
    with pytest.raises(ValueError, match=r"^eps: missing, and no public text fixes that of this model"):
        index_keys(STYLES["v4"], x, angles, weight)
    with pytest.raises(ValueError, match=r"^bias: a layer norm has one"):
        index_keys(STYLES["v32"], x, angles, weight)
    with pytest.raises(ValueError, match=r"^bias: a rms norm has none"):
        index_keys(STYLES["v41"], x, angles, weight, weight)


def test_only_part_of_a_key_turns() -> None:
    x, weight = draw(2, DIM), torch.ones(DIM)
    here, there = (rope_angles(torch.tensor([p, p]), 64, 1e4) for p in (3, 4))
    for name, still in (("v32", slice(64, None)), ("v41", slice(0, 64))):
        style = replace(STYLES[name], hadamard=False)
        options = {"bias": torch.zeros(DIM)} if name == "v32" else {}
        a, b = (index_keys(style, x, angles, weight, **options) for angles in (here, there))
        assert a[:, still].equal(b[:, still]) and not a.equal(b)


# ---- queries, weights, scores ---------------------------------------------------------------------------------------


def queries(name: str, keys: str, rule: str | None = None) -> tuple[IndexQueries, torch.Tensor, torch.Tensor]:
    """Queries of a model, the projections of which they are, and the projected weights."""
    record = index_format(keys)
    q, weights = draw(TOKENS, HEADS, DIM, seed=7).bfloat16(), draw(TOKENS, HEADS, seed=8).float()
    angles = rope_angles(torch.arange(TOKENS), 64, 1e4)
    found = index_queries(STYLES[name], record, rule or default_index_rule(record), q, angles, weights)
    return found, q, weights


def test_scales_of_fp8_queries_are_in_the_weights_and_those_of_mx_are_not() -> None:
    fp8, _, weights = queries("v32", "fp8")
    mx, _, _ = queries("v4", "mxfp4")
    assert fp8.scales is None and fp8.codes.shape == (TOKENS, HEADS, 128)
    assert mx.scales is not None and mx.scales.dtype is torch.int32 and mx.scales.shape == (TOKENS, HEADS)
    assert mx.codes.shape == (TOKENS, HEADS, 64)
    plain = weights.double() * HEADS**-0.5 * DIM**-0.5
    assert torch.allclose(mx.weights.double(), plain, rtol=1e-7)
    scales = fp8.weights.double() / plain
    assert scales.float().frexp().mantissa.sub(0.5).abs().max() < 1e-6, "scales of ue8m0 are powers of two"
    assert fold_weights(torch.ones(1, 64), 128)[0, 0].item() == pytest.approx(64**-0.5 * 128**-0.5)


@pytest.mark.parametrize("rule", index_rules_of(index_format("fp8")))
def test_scales_of_queries_follow_the_rule(rule: str) -> None:
    found, q, weights = queries("v32", "fp8", rule)
    turned = hadamard(
        torch.cat((rotate(q[..., :64], rope_angles(torch.arange(TOKENS), 64, 1e4)[:, None], interleaved=False),
                   q[..., 64:]), -1)
    )  # fmt: skip
    codes, words = quantise_keys(index_format("fp8"), turned.flatten(0, 1), rule)
    assert found.codes.view(-1, DIM).equal(codes)
    scales = words.view(torch.float32).view(TOKENS, HEADS)
    assert found.weights.equal(fold_weights(weights, DIM, scales))
    if rule != "pow2_amax_floor":
        amax = turned.float().abs().amax(-1)
        assert torch.allclose(scales, amax / 448, rtol=1e-6)


def scores_of(found: IndexQueries, keys: str, cached: torch.Tensor) -> torch.Tensor:
    """Scores of queries with keys that went through a cache, by the reference of the logits."""
    record, count = index_format(keys), len(cached)
    pool = poisoned_cache(record, DIM, PoolShape(4, 7), 8, "cpu")
    write_reference(record, pool, cached, torch.arange(count), default_index_rule(record))
    pages, offsets = torch.arange(count) // 7, torch.arange(count) % 7
    operands, factors = read_keys(record, pool, DIM, pages, offsets)
    if found.scales is None:
        values = found.codes.view(torch.float8_e4m3fn).double()
    else:
        words = found.scales.contiguous().view(torch.uint8).view(TOKENS, HEADS, 4)
        values = scaled_values(record, found.codes, words)
    products = torch.einsum("thd,kd->thk", values, operands).relu()
    return torch.einsum("th,thk->tk", found.weights.double(), products) * factors


@pytest.mark.parametrize(
    ("name", "keys", "most"),
    [("v32", "fp8", 0.1), ("glm5", "fp8", 0.1), ("v4", "mxfp8", 0.1), ("v4", "mxfp4", 0.3), ("v41", "mxfp4", 0.3)],
)
def test_scores_are_those_of_the_model_within_what_its_codes_hold(name: str, keys: str, most: float) -> None:
    """From projections to scores through the cache, beside the whole in fp64 without any rounding."""
    style, count = STYLES[name], 24
    found, q, weights = queries(name, keys)
    x, weight, bias = draw(count, DIM, seed=9).bfloat16(), 1 + 0.1 * draw(DIM, seed=5), 0.1 * draw(DIM, seed=6)
    options = {"bias": bias} if name in ("v32", "glm5") else {"eps": 1e-6}
    angles = rope_angles(torch.arange(count), 64, 1e4)
    scores = scores_of(found, keys, index_keys(style, x, angles, weight, **options))
    # The transform of both sides cancels out, so that the exact scores need none.
    exact_keys = index_keys(replace(style, hadamard=False), x.double(), angles, weight, **options)
    part = slice(0, 64) if style.rope_first else slice(64, 128)
    exact_q = q.double()
    exact_q[..., part] = rotate(exact_q[..., part].clone(), angles[:TOKENS, None], interleaved=style.interleaved)
    products = torch.einsum("thd,kd->thk", exact_q, exact_keys).relu()
    want = torch.einsum("th,thk->tk", weights.double(), products) * HEADS**-0.5 * DIM**-0.5

    def error(of: torch.Tensor) -> float:
        return float((of - want).abs().max() / want.abs().max())

    assert error(scores) < most
    # What is wrong is far outside: the other pairing, dims of the other end, the transform on one side.
    for wrong in (
        replace(style, interleaved=not style.interleaved),
        replace(style, rope_first=not style.rope_first),
        replace(style, hadamard=not style.hadamard),
    ):
        assert error(scores_of(found, keys, index_keys(wrong, x, angles, weight, **options))) > 0.5
