"""Candidate blocks of decode steps: what stages are launched with, and every argument that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

BATCH, NEXT_N, ROWS, PAGES, PAGE, WIDTH, K, SLOTS = 3, 2, 6, 20, 16, 100, 32, 5
FORMS = ["paged", "blocks", "candidates"]
SPEC = {
    "model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits", "topk", "sparse_decode"], "topk": 64,
    "index": {"heads": 24, "forms": FORMS},
}  # fmt: skip


def make(**index):
    fake = FakeDriver()
    fake.attributes = lambda ordinal, kernel: replace(GOOD, registers=128 if "sparse_decode" in str(kernel) else 60)
    spec = load_spec({**SPEC, "index": {**SPEC["index"], **index}})
    return fake, Kernels(spec, open_driver=lambda: fake, read=fake_cubins)


def step(kernels, plan, page=PAGE, **changes):
    given = {
        "q": torch.zeros(BATCH, NEXT_N, 16, 576).bfloat16(),
        "k_cache": torch.zeros(PAGES, page, 1, 656, dtype=torch.uint8),
        "index_q": torch.zeros(BATCH, NEXT_N, 24, 128, dtype=torch.uint8),
        "index_cache": torch.zeros(PAGES, page, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(ROWS, 24),
        "context_lens": torch.zeros(BATCH, NEXT_N, dtype=torch.int32),
        "block_table": torch.zeros(BATCH, 13, dtype=torch.int32),
    }
    return kernels.decode_step(**{**given, **changes}, plan=plan)


def blocks(kernels, driver):
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [(plans[r.symbol].variant, unpack(r.block, plans[r.symbol])) for r in driver.launches]


def test_a_layer_chooses_and_others_use():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    level = plan.candidates
    step(kernels, plan, candidates="choose")
    (scored, logits), (_, choice), (_, topk), (_, decode), *_ = blocks(kernels, driver)
    assert (scored.kernel, logits["unscored"], logits["block_scores"]) == ("blocks", 32, level.block_scores.data_ptr())
    assert (choice["scores"], choice["k"], choice["ordered"]) == (level.block_scores.data_ptr(), SLOTS, 1)
    assert (choice["lengths"], choice["page_size"]) == (level.block_counts.data_ptr(), PAGE // 8)
    assert (choice["out"], choice["raw"]) == (level.pages.data_ptr(), level.blocks.data_ptr())
    assert (topk["scores"], topk["k"], topk["out"]) == (logits["scores"], K, plan.ids.data_ptr())
    assert decode["indices"] == plan.ids.data_ptr()
    del driver.launches[:]
    step(kernels, plan, candidates="use")
    (scored, logits), (_, topk), (_, decode), *_ = blocks(kernels, driver)
    assert (scored.kernel, logits["candidates"], logits["width"]) == ("candidates", level.blocks.data_ptr(), 8 * SLOTS)
    assert (topk["scores"], topk["drops_neg_inf"], topk["page_size"]) == (level.compact.data_ptr(), 1, 8)
    assert (topk["page_table"], topk["out"]) == (level.pages.data_ptr(), plan.ids.data_ptr())
    assert [r.config.overlaps_previous for r in driver.launches][:3] == [False, True, True]
    plan.rebind()
    driver.stream = 4
    step(kernels, plan, candidates="use")


def test_few_blocks_hold_back_what_is_left_unscored():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=2)
    step(kernels, plan, candidates="choose")
    assert blocks(kernels, driver)[0][1]["unscored"] == 16
    # No more than there are, and as many as the model has.
    assert kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, candidate_blocks=2048).candidates.slots == 13
    assert kernels.plan_decode_step(1, 1, 1 << 17, candidate_blocks=2048).candidates.slots == 2048


def test_what_does_not_fit_is_named():
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: none were chosen with this plan yet: an earlier"):
        step(kernels, plan, candidates="use")
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: expected 'choose' or 'use', or None .*, found 'all'"):
        step(kernels, plan, candidates="all")
    text = r"^\[T-22\] candidates: the KV cache has pages of 12 tokens, and blocks of 8 would lie across them"
    with pytest.raises(GuardError, match=text):
        step(kernels, plan, page=12, candidates="choose")
    with pytest.raises(GuardError, match=r"^\[T-04\] index_q: dtype float32"):
        step(kernels, plan, candidates="choose", index_q=torch.zeros(BATCH, NEXT_N, 24, 128))
    step(kernels, plan, candidates="choose")
    nothing = dict.fromkeys(("index_q", "index_cache", "weights", "context_lens", "block_table"))
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: given with reuse_ids"):
        step(kernels, plan, candidates="use", reuse_ids=True, **nothing)
    plain = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: the plan has none: pass candidate_blocks"):
        step(kernels, plain, candidates="choose")
    for wanted, message in ((0, r"\[T-22\] candidate_blocks: 0: a token has 1"), (True, r"\[T-12\] candidate_blocks")):
        with pytest.raises(GuardError, match=f"^{message}"):
            kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, candidate_blocks=wanted)
    with pytest.raises(GuardError, match=r"^\[TK-04\] k: 5000, the spec declares a capacity of 4096"):
        kernels.plan_decode_step(BATCH, NEXT_N, 1 << 17, candidate_blocks=5000)
    for forms in (["paged", "blocks"], ["paged", "candidates"]):
        _, without = make(forms=forms)
        with pytest.raises(GuardError, match=r"^\[T-11\] candidate_blocks: the spec \w+ declares index.forms"):
            without.plan_decode_step(BATCH, NEXT_N, WIDTH, candidate_blocks=SLOTS)


def test_graphs_of_torch_refuse_them(monkeypatch):
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(GuardError, match=r"^\[T-19\] candidates: no op of torch takes them"):
        step(kernels, plan, candidates="choose")
