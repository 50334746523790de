"""The logits over keys in one piece through the runtime: argument blocks, and every argument that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

TOKENS, KEYS = 5, 70
INDEX = {"heads": 24, "forms": ["ragged"]}
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
        "q": codes(TOKENS, 24, 128),
        "keys": codes(KEYS, 128),
        "key_scales": torch.zeros(KEYS),
        "weights": torch.zeros(TOKENS, 24),
        "starts": ints(TOKENS),
        "ends": ints(TOKENS),
    }
    return {**given, **changes}


def block_of(kernels, driver):
    (record,) = driver.launches
    (plan,) = kernels._on(0).by_role["indexer_logits", "ragged"]
    assert record.symbol == plan.symbol
    return record, unpack(record.block, plan)


def test_block_of_a_call():
    driver, kernels = make()
    given = tensors()
    out = kernels.indexer_logits_ragged(**given, unscored_up_to=7, fill_neg_inf=True)
    record, block = block_of(kernels, driver)
    assert (out.shape, out.dtype, out.stride()) == ((TOKENS, KEYS), torch.float32, (72, 1))
    assert {name: block[name] for name in ("q", "keys", "scales", "weights", "starts", "ends", "scores")} == {
        **{name: given[name].data_ptr() for name in ("q", "keys", "weights", "starts", "ends")},
        "scales": given["key_scales"].data_ptr(),
        "scores": out.data_ptr(),
    }
    assert (block["q_stride_t"], block["q_stride_h"], block["weight_stride"]) == (24 * 128, 128, 24)
    assert (block["key_stride_bytes"], block["scale_stride_bytes"], block["key_count"]) == (128, 4, KEYS)
    assert (block["start_stride"], block["end_stride"], block["wide_copies"]) == (1, 1, 1)
    assert (block["score_stride"], block["width"], block["compressed"]) == (72, KEYS, 0)
    assert (block["tokens"], block["heads"], block["unit_tokens"], block["unit_count"]) == (TOKENS, 24, 5, 1)
    assert (block["unscored"], block["fills"], block["blocks"], record.config.grid) == (7, 1, 2, 2)


def test_compressed_rows_and_strided_tensors():
    driver, kernels = make(keys="mxfp4")
    q, scales = codes(TOKENS, 25, 80)[:, :24, :64], ints(TOKENS, 30)[:, :24]
    given = tensors(q=q, keys=codes(KEYS, 68)[:, :64], key_scales=ints(KEYS, 3)[:, 1], ends=ints(TOKENS, 2)[:, 1])
    out = torch.zeros(TOKENS, 50)[:, 3:43]
    assert kernels.indexer_logits_ragged(**given, q_scales=scales, max_window=40, out=out) is out
    _, block = block_of(kernels, driver)
    assert (block["q_stride_t"], block["q_stride_h"], block["q_scales"]) == (25 * 80, 80, scales.data_ptr())
    assert (block["q_scale_stride_t"], block["key_stride_bytes"], block["scale_stride_bytes"]) == (30, 68, 12)
    assert (block["wide_copies"], block["end_stride"], block["start_stride"]) == (0, 2, 1)
    assert (block["width"], block["compressed"], block["score_stride"]) == (40, 1, 50)


def test_nothing_is_launched_for_nothing():
    driver, kernels = make()
    none = {"q": codes(0, 24, 128), "weights": torch.zeros(0, 24), "starts": ints(0), "ends": ints(0)}
    assert kernels.indexer_logits_ragged(**tensors(**none)).shape == (0, KEYS)
    assert kernels.indexer_logits_ragged(**tensors(), max_window=0).shape == (TOKENS, 0)
    assert not driver.launches
    # Without keys there is something to fill.
    empty = tensors(keys=codes(0, 128), key_scales=torch.zeros(0))
    assert kernels.indexer_logits_ragged(**empty, max_window=9, fill_neg_inf=True).shape == (TOKENS, 9)
    assert len(driver.launches) == 1


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": codes(TOKENS, 1, 24, 128)}, "[T-05] q: 4 dims"),
    ({"q": codes(TOKENS, 16, 128)}, "[T-06] q: shape (5, 16, 128), expected [tokens, heads, dim], e4m3 codes"),
    ({"q": torch.zeros(TOKENS, 24, 128)}, "[T-04] q: dtype float32"),
    ({"q": codes(TOKENS, 24, 132)[..., :128]}, "[IL-26] q: strides "),
    ({"q": codes(TOKENS * 24 * 128 + 1)[1:].view(TOKENS, 24, 128)}, "[IL-16] q: address 0x"),
    ({"keys": codes(KEYS, 64)}, "[T-06] keys: shape (70, 64), expected [keys, bytes of fp8 codes] = (*, 128)"),
    ({"keys": codes(1, KEYS, 128)}, "[T-05] keys: 3 dims"),
    ({"keys": codes(KEYS, 130)[:, :128]}, "[IL-23] keys: address "),
    ({"keys": codes(KEYS * 128 + 2)[2:].view(KEYS, 128)}, "[IL-23] keys: address "),
    ({"keys": codes(9000).as_strided((KEYS, 128), (124, 1))}, "[IL-24] keys: stride 124 B does not hold codes"),
    (
        {"key_scales": ints(KEYS)},
        "[T-04] key_scales: dtype int32, expected float32 for [keys], a scale each of fp8 keys",
    ),
    ({"key_scales": torch.zeros(KEYS - 1)}, "[T-06] key_scales: shape (69,), expected [keys], "),
    ({"weights": torch.zeros(TOKENS, 16)}, "[T-06] weights: shape (5, 16), expected [tokens, heads] = (5, 24)"),
    ({"starts": ints(TOKENS + 1)}, "[T-06] starts: shape (6,), expected [tokens] = (5,)"),
    ({"ends": ints(TOKENS, 1)}, "[T-05] ends: 2 dims"),
    ({"ends": torch.zeros(TOKENS, dtype=torch.int64)}, "[T-04] ends: dtype int64, expected int32"),
    ({"q_scales": ints(TOKENS, 24)}, "[T-23] q_scales: given, and fp8 keys have one fp32 scale each"),
    ({"max_window": -1}, "[IL-25] max_window: -1 is outside"),
    ({"max_window": 2.0}, "[T-12] max_window: expected a whole number"),
    ({"unscored_up_to": -1}, "[IL-13] unscored_up_to: -1 is outside"),
    ({"fill_neg_inf": 1}, "[T-12] fill_neg_inf: expected True or False"),
    ({"out": torch.zeros(TOKENS, 69)}, "[T-06] out: shape (5, 69), expected [tokens, keys] = (5, 70)"),
    (
        {"out": torch.zeros(TOKENS, 9), "max_window": 8},
        "[T-06] out: shape (5, 9), expected [tokens, max_window] = (5, 8)",
    ),
    ({"out": torch.zeros(KEYS).expand(TOKENS, KEYS)}, "[T-08] out: strides (0, 1)"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_does_not_fit_is_named(changes, message):
    driver, kernels = make()
    with pytest.raises(GuardError) as caught:
        kernels.indexer_logits_ragged(**{**tensors(), **changes})
    assert str(caught.value).startswith(message)
    assert not driver.launches


def test_scales_of_another_kind_are_refused():
    _, kernels = make(keys="mxfp8")
    with pytest.raises(GuardError, match=r"^\[T-23\] q_scales: missing, and mxfp8 codes of q have a ue8m0"):
        kernels.indexer_logits_ragged(**tensors())
    with pytest.raises(GuardError, match=r"^\[T-04\] key_scales: dtype float32, expected int32 for \[keys\], words of"):
        kernels.indexer_logits_ragged(**tensors(), q_scales=ints(TOKENS, 24))


def test_a_form_that_the_spec_does_not_have_is_refused():
    _, kernels = make(forms=["paged"])
    with pytest.raises(GuardError, match=r"^\[T-11\] indexer_logits_ragged: .* index.forms paged: add ragged there"):
        kernels.indexer_logits_ragged(**tensors())
    _, kernels = make()
    with pytest.raises(GuardError, match=r"^\[T-11\] indexer_logits: .* index.forms ragged: add paged there"):
        kernels.indexer_logits(
            codes(1, 1, 24, 128), codes(1, 64, 1, 132), torch.zeros(1, 24), ints(1), ints(1, 1), max_seq_len=9
        )
    assert [len(make(forms=forms)[1]._on(0).plans) for forms in (["paged"], ["ragged"], ["paged", "ragged"])] == [
        1,
        1,
        2,
    ]


def test_windows_are_judged_where_values_are_checked(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()

    def call(starts, ends, **options):
        windows = {
            name: torch.tensor(values, dtype=torch.int32) for name, values in (("starts", starts), ("ends", ends))
        }
        kernels.indexer_logits_ragged(**tensors(**windows), **options)

    good = [0, 0, 3, 70, 9], [0, 70, 7, 70, 19]
    call(*good)
    for starts, ends, token in (
        ([-1, 0, 3, 70, 9], good[1], 0),
        ([0, 0, 8, 70, 9], good[1], 2),
        (good[0], [0, 71, 7, 70, 19], 1),
    ):
        with pytest.raises(GuardError, match=rf"^\[IL-27\] starts, ends: token {token} sees keys "):
            call(starts, ends)
    call(*good, max_window=70)
    with pytest.raises(
        GuardError, match=r"^\[IL-28\] starts, ends: token 1 sees 70 keys, more than the 9 of .*\(2 tokens"
    ):
        call(*good, max_window=9)
    assert len(driver.launches) == 2
    driver.capturing = True
    with pytest.raises(GuardError, match=r"^\[T-13\]"):
        call(*good)


def test_sizes_whose_tiles_leave_int32_are_refused():
    _, kernels = make()
    given = tensors(
        q=codes(1, 24, 128).expand(900_000, 24, 128),
        weights=torch.zeros(1, 24).expand(900_000, 24),
        starts=ints(1).expand(900_000),
        ends=ints(1).expand(900_000),
        keys=codes(1, 128).expand(1_000_000, 128),
        key_scales=torch.zeros(1).expand(1_000_000),
    )
    with pytest.raises(GuardError, match=r"^\[IL-22\] \d+ tiles of keys: 180000 units that may see 1000000 keys each"):
        kernels.indexer_logits_ragged(**given, max_window=1)


def test_explain_of_calls_tells_each_form():
    _, kernels = make(forms=["paged", "ragged"])
    text = kernels.explain("indexer_logits", batch=4, s_q=2, width=1000)
    assert "shape: 4 requests of 2 tokens, 24 heads, up to 1000 keys\n" in text
    assert "shape: 8 tokens, 24 heads, windows of 1000 keys\n" in text
    assert "units: 2, 5 neighbouring tokens share a pass over their keys\n" in text
    assert text.count("[IL-27]") == 1 and text.count("[IL-14]") == 1 and text.count("[IL-16]") == 2
