"""The indexer's logits through the runtime: argument blocks, and every argument that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.errors import FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

BATCH, NEXT_N, PAGES, PAGE, WIDTH = 3, 2, 5, 16, 40
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": {"heads": 24}}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(**changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=128))
    return driver, Kernels(load_spec({**SPEC, **changes}), open_driver=lambda: driver, read=fake_cubins)


def cache(pages=PAGES, page_size=PAGE, pad=0, dim=128, offset=0):
    stride = page_size * (dim + 4) + pad
    pool = torch.zeros((pages + 1) * stride + offset, dtype=torch.uint8)
    return pool.as_strided((pages, page_size, 1, dim + 4), (stride, dim + 4, dim + 4, 1), offset)


def tensors(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(BATCH, NEXT_N, 24, 128, dtype=torch.float8_e4m3fn),
        "k_cache": cache(),
        "weights": torch.zeros(BATCH * NEXT_N, 24),
        "context_lens": torch.zeros(BATCH, NEXT_N, dtype=torch.int32),
        "block_table": torch.zeros(BATCH, 3, dtype=torch.int32),
    }
    return {**given, **changes}


def block_of(kernels, driver):
    (record,) = driver.launches
    (plan,) = kernels._on(0).plans
    assert record.symbol == plan.symbol
    return record, unpack(record.block, plan)


def test_block_of_a_call():
    driver, kernels = make()
    given = tensors()
    out = kernels.indexer_logits(**given, max_seq_len=WIDTH, unscored_up_to=7, fill_neg_inf=True)
    record, block = block_of(kernels, driver)
    assert (out.shape, out.dtype, out.stride()) == ((6, WIDTH), torch.float32, (WIDTH, 1))
    assert {name: block[name] for name in ("q", "k_cache", "weights", "lens", "block_table", "scores")} == {
        **{name: given[name].data_ptr() for name in ("q", "k_cache", "weights", "block_table")},
        "lens": given["context_lens"].data_ptr(),
        "scores": out.data_ptr(),
    }
    assert {name: block[name] for name in ("q_stride_b", "q_stride_n", "q_stride_h")} == {
        "q_stride_b": NEXT_N * 24 * 128, "q_stride_n": 24 * 128, "q_stride_h": 128
    }  # fmt: skip
    assert (block["page_stride_bytes"], block["pool_pages"], block["page_size"]) == (PAGE * 132, PAGES, PAGE)
    assert (block["page_multiplier"], block["page_shift"]) == (1 << 31, 4)
    assert (block["wide_copies"], block["most_keys"], block["width"]) == (1, WIDTH, WIDTH)
    assert (block["lens_stride_b"], block["lens_stride_n"], block["per_token"]) == (NEXT_N, 1, 1)
    assert (block["weight_stride"], block["table_stride"], block["score_stride"]) == (24, 3, WIDTH)
    assert (block["batch"], block["next_n"], block["heads"]) == (BATCH, NEXT_N, 24)
    assert (block["unit_tokens"], block["unit_count"], block["unscored"], block["fills"]) == (2, 1, 7, 1)
    assert (block["blocks"], record.config.grid, record.config.threads) == (3, 3, 128)


def test_strided_tensors_and_one_length_a_request():
    driver, kernels = make()
    q = torch.zeros(BATCH, NEXT_N + 1, 24, 144, dtype=torch.uint8)[:, 1:, :, :128]
    lens = torch.zeros(BATCH, 5, dtype=torch.int32)[:, 2]
    out = torch.zeros(7, WIDTH + 9)[:6, 3 : 3 + WIDTH]
    given = tensors(q=q, context_lens=lens, weights=torch.zeros(6, 30)[:, :24], k_cache=cache(pad=4))
    assert kernels.indexer_logits(**given, out=out) is out
    _, block = block_of(kernels, driver)
    assert (block["q_stride_b"], block["q_stride_n"], block["q_stride_h"]) == (3 * 24 * 144, 24 * 144, 144)
    assert (block["lens"], block["lens_stride_b"], block["per_token"]) == (lens.data_ptr(), 5, 0)
    assert (block["weight_stride"], block["score_stride"], block["scores"]) == (30, WIDTH + 9, out.data_ptr())
    assert (block["wide_copies"], block["page_stride_bytes"]) == (0, PAGE * 132 + 4)


def test_keys_end_where_scores_or_tables_do():
    for width, most in ((40, 40), (48, 48), (100, 48)):
        driver, kernels = make()
        kernels.indexer_logits(**tensors(), max_seq_len=width)
        assert block_of(kernels, driver)[1]["most_keys"] == most


def test_rows_of_allocated_scores_start_at_16_bytes():
    for scores, dtype, step in (("fp32", torch.float32, 4), ("bf16", torch.bfloat16, 8)):
        _, kernels = make(scores=scores)
        out = kernels.indexer_logits(**tensors(), max_seq_len=41)
        assert (out.dtype, out.shape, out.stride(0)) == (dtype, (6, 41), -(-41 // step) * step)


def test_nothing_is_launched_for_nothing():
    driver, kernels = make()
    empty = tensors(
        q=torch.zeros(0, 2, 24, 128, dtype=torch.uint8),
        weights=torch.zeros(0, 24),
        context_lens=torch.zeros(0, 2, dtype=torch.int32),
        block_table=torch.zeros(0, 3, dtype=torch.int32),
    )
    assert kernels.indexer_logits(**empty, max_seq_len=9).shape == (0, 9)
    assert kernels.indexer_logits(**tensors(), max_seq_len=0).shape == (6, 0)
    assert not driver.launches


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(("keys", "codes"), [("mxfp8", 128), ("mxfp4", 64)])
def test_block_of_a_call_with_scales_of_q(keys, codes):
    driver, kernels = make(index={"heads": 24, "keys": keys})
    q = torch.zeros(BATCH, NEXT_N, 24, codes, dtype=torch.uint8)
    scales = words(BATCH, NEXT_N + 1, 30)[:, 1:, :24]
    given = tensors(q=q, k_cache=cache(dim=codes), q_scales=scales)
    kernels.indexer_logits(**given, max_seq_len=WIDTH)
    _, block = block_of(kernels, driver)
    assert (block["q_scales"], block["q_scale_stride_b"], block["q_scale_stride_n"]) == (scales.data_ptr(), 90, 30)
    assert (block["q_stride_h"], block["page_stride_bytes"]) == (codes, PAGE * (codes + 4))


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ("fp8", {"q_scales": words(3, 2, 24)}, "[T-23] q_scales: given, and fp8 keys have one fp32 scale each"),
        ("mxfp8", {}, "[T-23] q_scales: missing, and mxfp8 codes of q have a ue8m0 for 32 dims"),
        ("mxfp8", {"q_scales": words(3, 2, 24).float()}, "[T-04] q_scales: dtype float32, expected int32 for [batch, "),
        ("mxfp8", {"q_scales": words(6, 24)}, "[T-05] q_scales: 2 dims (6, 24), expected 3: [batch, next_n, heads], "),
        (
            "mxfp8",
            {"q_scales": words(3, 2, 16)},
            "[T-06] q_scales: shape (3, 2, 16), expected [batch, next_n, ",
        ),
        ("mxfp8", {"q_scales": words(3, 24, 2).transpose(1, 2)}, "[T-07] q_scales: last dim has stride 2"),
        ("mxfp8", {"k_cache": cache(dim=64), "q_scales": words(3, 2, 24)}, "[T-06] k_cache: shape (5, 16, 1, 68), "),
        ("mxfp4", {"q_scales": words(3, 2, 24)}, "[T-04] q: dtype float8_e4m3fn, expected uint8 or int8 for [batch, "),
        (
            "mxfp4",
            {"q": torch.zeros(3, 2, 24, 128, dtype=torch.uint8), "q_scales": words(3, 2, 24)},
            "[T-06] q: shape (3, 2, 24, 128), expected [batch, next_n, heads, dim / 2], e2m1 codes = (*, *, 24, 64)",
        ),
        (
            "mxfp4",
            {"q": torch.zeros(3, 2, 24, 64, dtype=torch.uint8), "q_scales": words(3, 2, 24)},
            "[T-06] k_cache: shape (5, 16, 1, 132), expected [pages, page_size, 1, bytes of a mxfp4 key] = ",
        ),
    ],
)
def test_scales_and_codes_of_another_format_are_refused(keys, changes, message):
    driver, kernels = make(index={"heads": 24, "keys": keys})
    with pytest.raises(GuardError) as caught:
        kernels.indexer_logits(**{**tensors(), "max_seq_len": WIDTH, **changes})
    assert str(caught.value).startswith(message)
    assert not driver.launches


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": None}, "[T-01] q: expected a torch.Tensor, found NoneType"),
    ({"q": torch.zeros(3, 2, 24, 128)}, "[T-04] q: dtype float32, expected float8_e4m3fn or uint8 or int8"),
    ({"q": torch.zeros(3, 2, 16, 128, dtype=torch.uint8)}, "[T-06] q: shape (3, 2, 16, 128), expected"),
    ({"q": torch.zeros(6, 24, 128, dtype=torch.uint8)}, "[T-05] q: 3 dims"),
    ({"q": torch.zeros(3, 9, 24, 128, dtype=torch.uint8)}, "[IL-05] q: 3 requests of 9 tokens"),
    ({"q": torch.zeros(3, 2, 24, 132, dtype=torch.uint8)[..., :128]}, "[IL-11] q: strides "),
    ({"q": torch.zeros(3 * 2 * 24 * 128 + 1, dtype=torch.uint8)[1:].view(3, 2, 24, 128)}, "[IL-16] q: address 0x"),
    ({"k_cache": cache(dim=64)}, "[T-06] k_cache: shape (5, 16, 1, 68), expected"),
    ({"k_cache": cache().squeeze(2)}, "[T-05] k_cache: 3 dims"),
    ({"k_cache": cache()[:0]}, "[IL-08] k_cache: 0 pages of 16 keys"),
    ({"k_cache": cache(pad=2)}, "[IL-09] k_cache: page stride "),
    ({"k_cache": cache(offset=2)}, "[IL-15] k_cache: base address 0x"),
    ({"k_cache": cache(pad=-4)}, "[IL-10] k_cache: row stride 132 B and page stride 2108 B"),
    ({"k_cache": cache().to(torch.float32)}, "[T-04] k_cache: dtype float32"),
    ({"weights": torch.zeros(6, 24, dtype=torch.bfloat16)}, "[T-04] weights: dtype bfloat16, expected float32"),
    ({"weights": torch.zeros(3, 24)}, "[T-06] weights: shape (3, 24), expected [batch * next_n, heads] = (6, 24)"),
    ({"weights": torch.zeros(24, 6).T}, "[T-07] weights: last dim has stride 6"),
    ({"context_lens": torch.zeros(3, 2)}, "[T-04] context_lens: dtype float32, expected int32"),
    ({"context_lens": torch.zeros(3, 2, dtype=torch.int64)}, "[T-04] context_lens: dtype int64"),
    ({"context_lens": torch.zeros(6, dtype=torch.int32)}, "[T-06] context_lens: shape (6,), expected"),
    ({"context_lens": torch.zeros(3, 1, dtype=torch.int32)}, "[T-06] context_lens: shape (3, 1), expected"),
    ({"context_lens": torch.zeros(3, 2, 1, dtype=torch.int32)}, "[T-05] context_lens: 3 dims"),
    ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, "[T-06] block_table: shape (2, 3), expected"),
    ({"block_table": torch.zeros(3, 3, dtype=torch.int64)}, "[T-04] block_table: dtype int64"),
    ({"max_seq_len": None}, "[T-21] max_seq_len: missing, and without out nothing tells how wide scores are"),
    ({"max_seq_len": 40.0}, "[T-12] max_seq_len: expected a whole number"),
    ({"max_seq_len": -1}, "[IL-06] max_seq_len: -1 is outside"),
    ({"max_seq_len": 2**31}, "[IL-06] max_seq_len: 2147483648 is outside"),
    ({"unscored_up_to": -1}, "[IL-13] unscored_up_to: -1 is outside"),
    ({"unscored_up_to": True}, "[T-12] unscored_up_to: expected a whole number"),
    ({"fill_neg_inf": 1}, "[T-12] fill_neg_inf: expected True or False"),
    ({"out": torch.zeros(6, 39)}, "[T-06] out: shape (6, 39), expected [batch * next_n, max_seq_len] = (6, 40)"),
    ({"out": torch.zeros(6, 40, dtype=torch.bfloat16)}, "[T-04] out: dtype bfloat16, expected float32"),
    ({"out": torch.zeros(40).expand(6, 40)}, "[T-08] out: strides (0, 1)"),
    (
        {"out": torch.zeros(6, 40), "max_seq_len": None, "weights": torch.zeros(6, 24).requires_grad_()},
        "[T-02] weights",
    ),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_does_not_fit_is_named(changes, message):
    driver, kernels = make()
    with pytest.raises(GuardError) as caught:
        kernels.indexer_logits(**{**tensors(), "max_seq_len": WIDTH, **changes})
    assert str(caught.value).startswith(message)
    assert not driver.launches


def test_scores_over_inputs_are_refused():
    _, kernels = make()
    memory = torch.zeros(6, 40)
    with pytest.raises(GuardError, match=r"^\[T-08\] out: its memory overlaps that of weights"):
        kernels.indexer_logits(**tensors(weights=memory[:, :24]), out=memory)


def test_sizes_whose_tiles_leave_int32_are_refused():
    _, kernels = make()
    with pytest.raises(GuardError, match=r"^\[IL-07\] \d+ tiles of keys: 40000 units"):
        kernels.indexer_logits(
            torch.zeros(1, 1, 24, 128, dtype=torch.uint8).expand(40_000, 1, 24, 128),
            cache(),
            torch.zeros(1, 24).expand(40_000, 24),
            torch.zeros(1, dtype=torch.int32).expand(40_000),
            torch.zeros(1, 3, dtype=torch.int32).expand(40_000, 3),
            max_seq_len=2**31 - 65,
        )


def test_longer_lengths_are_errors_where_values_are_checked(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    lens = torch.tensor([[1, 2], [-5, 40], [41, 99]], dtype=torch.int32)
    with pytest.raises(
        GuardError, match=r"^\[IL-14\] context_lens: token 0 of request 2 sees 41 keys, .* \(2 tokens do\)"
    ):
        kernels.indexer_logits(**tensors(context_lens=lens), max_seq_len=WIDTH)
    with pytest.raises(
        GuardError, match=r"^\[IL-14\] context_lens: token 1 of request 1 sees 49 keys, more than the 48"
    ):
        short = torch.tensor([0, 49, 1], dtype=torch.int32)
        kernels.indexer_logits(**tensors(context_lens=short), max_seq_len=99)
    kernels.indexer_logits(**tensors(context_lens=lens.clamp(max=40)), max_seq_len=WIDTH)
    # Request 1 sees the first 40 keys, so two pages and a half of PAGE; request 0 two keys of its first page.
    table = torch.tensor([[0, PAGES, PAGES], [1, 2, PAGES + 7], [-1, 0, 1]], dtype=torch.int32)
    with pytest.raises(GuardError, match=rf"^\[IL-17\] block_table\[1, 2\] = {PAGES + 7}: .* \(1 past it\)"):
        kernels.indexer_logits(**tensors(context_lens=lens.clamp(max=40), block_table=table), max_seq_len=WIDTH)
    kernels.indexer_logits(**tensors(context_lens=lens.clamp(max=32), block_table=table), max_seq_len=WIDTH)
    assert len(driver.launches) == 2
    driver.capturing = True
    with pytest.raises(GuardError, match=r"^\[T-13\]"):
        kernels.indexer_logits(**tensors(), max_seq_len=WIDTH)


def test_other_ops_and_late_loads_are_refused():
    _, kernels = make(ops=["topk", "indexer_logits"])
    with pytest.raises(GuardError, match=r"^\[T-11\] sparse_decode"):
        kernels.plan_sparse_decode(1, 1, 64)
    _, others = make(ops=["topk"], index=None)
    with pytest.raises(GuardError, match=r"^\[T-11\] indexer_logits: the spec v32_h16 declares ops topk"):
        others.indexer_logits(**tensors(), max_seq_len=WIDTH)
    _, frozen = make()
    frozen.freeze()
    with pytest.raises(FrozenError):
        frozen.indexer_logits(**tensors(), max_seq_len=WIDTH)


def test_explain_of_a_call():
    _, kernels = make()
    text = kernels.explain("indexer_logits", batch=4, s_q=2, width=1000)
    assert text.startswith("indexer_logits: v32_h16 on device 0 (fake H200, sm_90a, 132 SMs)\nshape: 4 requests of 2")
    assert "grid: 64 CTAs share up to 64 tiles of 64 keys" in text
    with pytest.raises(GuardError, match=r"^\[T-16\] width: missing, and what a call of indexer_logits takes"):
        kernels.explain("indexer_logits", batch=1)
