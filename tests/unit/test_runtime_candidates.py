"""The logits in candidate blocks through the runtime: argument blocks, and every argument that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

BATCH, NEXT_N, ROWS, SLOTS = 2, 3, 6, 5
INDEX = {"heads": 24, "forms": ["candidates"]}
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": INDEX}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(**index):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=200))
    spec = load_spec({**SPEC, "index": {**INDEX, **index}})
    return driver, Kernels(spec, open_driver=lambda: driver, read=fake_cubins)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def tensors(**changes: Any) -> dict[str, Any]:
    given = {
        "q": codes(BATCH, NEXT_N, 24, 128),
        "k_cache": codes(9, 61, 1, 132),
        "weights": torch.zeros(ROWS, 24),
        "context_lens": ints(BATCH, NEXT_N),
        "block_table": ints(BATCH, 4),
        "candidate_blocks": ints(ROWS, SLOTS),
    }
    return {**given, **changes}


def block_of(kernels, driver):
    (record,) = driver.launches
    (plan,) = kernels._on(0).by_role["indexer_logits", "candidates"]
    assert record.symbol == plan.symbol
    return record, unpack(record.block, plan)


def test_block_of_a_call():
    driver, kernels = make()
    given = tensors(candidate_blocks=ints(ROWS, 8)[:, :SLOTS])
    out = kernels.indexer_logits_candidates(**given)
    record, block = block_of(kernels, driver)
    assert (out.shape, out.dtype, out.stride()) == ((ROWS, 40), torch.float32, (40, 1))
    assert (block["candidates"], block["candidate_stride"]) == (given["candidate_blocks"].data_ptr(), 8)
    assert (block["block_shift"], block["width"], block["most_keys"]) == (3, 40, 4 * 61)
    assert (block["scores"], block["lens"]) == (out.data_ptr(), given["context_lens"].data_ptr())
    # A list is one token's: units of one, a tile each.
    assert (block["unit_tokens"], block["unit_count"], block["blocks"], record.config.grid) == (1, 3, 6, 6)


@pytest.mark.parametrize(("longest", "bound"), [(0, 0), (203, 203), (244, 244), (245, 244), (None, 244)])
def test_lengths_are_bounded_to_what_the_table_names_and_to_max_seq_len(longest, bound):
    driver, kernels = make()
    kernels.indexer_logits_candidates(**tensors(), max_seq_len=longest)
    assert block_of(kernels, driver)[1]["most_keys"] == bound
    for wrong, text in ((-1, r"\[IL-06\] max_seq_len: -1 is outside"), (2.0, r"\[T-\d+\] max_seq_len: ")):
        with pytest.raises(GuardError, match=text):
            kernels.indexer_logits_candidates(**tensors(), max_seq_len=wrong)


def test_blocks_of_16_and_a_given_out():
    driver, kernels = make(keys="mxfp4")
    q, pool = codes(BATCH, NEXT_N, 24, 64), codes(9, 61, 1, 68)
    out = torch.zeros(ROWS, 90)[:, :80]
    given = tensors(q=q, k_cache=pool, q_scales=ints(BATCH, NEXT_N, 24))
    assert kernels.indexer_logits_candidates(**given, block_size=16, out=out) is out
    _, block = block_of(kernels, driver)
    assert (block["block_shift"], block["width"], block["score_stride"]) == (4, 80, 90)
    assert block["q_scales"] == given["q_scales"].data_ptr()


def test_nothing_is_launched_for_nothing():
    driver, kernels = make()
    assert kernels.indexer_logits_candidates(**tensors(candidate_blocks=ints(ROWS, 0))).shape == (ROWS, 0)
    none = {
        "q": codes(0, 1, 24, 128),
        "weights": torch.zeros(0, 24),
        "context_lens": ints(0),
        "block_table": ints(0, 4),
    }
    assert kernels.indexer_logits_candidates(**tensors(**none, candidate_blocks=ints(0, 3))).shape == (0, 24)
    assert not driver.launches


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": codes(ROWS, 24, 128)}, "[T-05] q: 3 dims"),
    ({"q": codes(1, 9, 24, 128)}, "[IL-05] q: 1 requests of 9 tokens"),
    ({"k_cache": codes(9, 64, 1, 128)}, "[T-06] k_cache: shape"),
    ({"weights": torch.zeros(ROWS, 16)}, "[T-06] weights: shape (6, 16), expected [batch * next_n, heads] = (6, 24)"),
    ({"context_lens": ints(3)}, "[T-06] context_lens: shape (3,)"),
    (
        {"candidate_blocks": ints(BATCH, SLOTS)},
        "[T-06] candidate_blocks: shape (2, 5), expected [batch * next_n, slots] = (6, *)",
    ),
    ({"candidate_blocks": ints(BATCH, NEXT_N, SLOTS)}, "[T-05] candidate_blocks: 3 dims"),
    ({"candidate_blocks": ints(ROWS, SLOTS).long()}, "[T-04] candidate_blocks: dtype int64, expected int32"),
    ({"candidate_blocks": ints(SLOTS, ROWS).t()}, "[T-07] candidate_blocks: "),
    ({"block_size": 12}, "[IL-30] block_size: 12 keys"),
    ({"block_size": 8.0}, "[T-12] block_size: expected a whole number"),
    ({"q_scales": ints(BATCH, NEXT_N, 24)}, "[T-23] q_scales: given, and fp8 keys have one fp32 scale each"),
    (
        {"out": torch.zeros(ROWS, 39)},
        "[T-06] out: shape (6, 39), expected [batch * next_n, slots * block_size] = (6, 40)",
    ),
    ({"out": torch.zeros(40).expand(ROWS, 40)}, "[T-08] out: strides (0, 1)"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_does_not_fit_is_named(changes, message):
    driver, kernels = make()
    with pytest.raises(GuardError) as caught:
        kernels.indexer_logits_candidates(**{**tensors(), **changes})
    assert str(caught.value).startswith(message)
    assert not driver.launches


def test_a_form_that_the_spec_does_not_have_is_refused():
    _, kernels = make(forms=["paged", "ragged"])
    with pytest.raises(
        GuardError, match=r"^\[T-11\] indexer_logits_candidates: .* index.forms paged, ragged: add candidates there"
    ):
        kernels.indexer_logits_candidates(**tensors())


def test_values_are_judged_where_they_are_checked(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    # 4 pages of 61 keys are 30 blocks and 4 keys.
    blocks = torch.full((ROWS, SLOTS), 30, dtype=torch.int32)
    blocks[0] = -(2**31)
    lens = torch.tensor([[244, 3, 0], [-1, 244, 9]], dtype=torch.int32)
    kernels.indexer_logits_candidates(**tensors(candidate_blocks=blocks, context_lens=lens))
    blocks[4, 2] = 31
    with pytest.raises(
        GuardError, match=r"^\[IL-32\] candidate_blocks\[4, 2\] = 31: a row of block_table names 31 blocks of 8 keys"
    ):
        kernels.indexer_logits_candidates(**tensors(candidate_blocks=blocks))
    with pytest.raises(GuardError, match=r"^\[IL-14\] context_lens: token 1 of request 0 sees 245 keys"):
        kernels.indexer_logits_candidates(**tensors(context_lens=lens.roll(1, 1) + 1))
    with pytest.raises(GuardError, match=r"^\[IL-17\] block_table\[0, 0\] = 9: k_cache has 9 pages"):
        kernels.indexer_logits_candidates(**tensors(block_table=ints(BATCH, 4) + 9, context_lens=lens))
    assert len(driver.launches) == 1


def test_explain_of_calls_tells_what_lists_cost():
    _, kernels = make(forms=["paged", "candidates"])
    text = kernels.explain("indexer_logits", batch=4, s_q=2, width=1000)
    assert "shape: 4 requests of 2 tokens, 24 heads, up to 1000 keys\n" in text
    assert "shape: 4 requests of 2 tokens, 24 heads, 1000 keys in candidate blocks\n" in text
    assert "units: 2 a request, each token takes a pass over its keys\n" in text
    assert text.count("[IL-32]") == 1 and text.count("[IL-13]") == 1 and text.count("[IL-14]") == 2
