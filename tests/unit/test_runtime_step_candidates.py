"""Candidate blocks of decode steps: what stages are launched with, and every argument that does not fit."""

from __future__ import annotations

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins, take_registers_of_steps, unpack

from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.step_candidates import StepBlocks
from dsagen.spec import load_spec

BATCH, NEXT_N, ROWS, PAGES, PAGE, WIDTH, K, SLOTS = 3, 2, 6, 20, 16, 100, 32, 5
FORMS = ["paged", "blocks", "candidates"]
SPEC = {
    "model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits", "topk", "sparse_decode"], "topk": 64,
    "index": {"heads": 24, "forms": FORMS},
}  # fmt: skip


def make(**index):
    fake = FakeDriver()
    take_registers_of_steps(fake)
    spec = load_spec({**SPEC, "index": {**SPEC["index"], **index}})
    return fake, Kernels(spec, open_driver=lambda: fake, read=fake_cubins)


def inputs(page=PAGE):
    return {
        "q": torch.zeros(BATCH, NEXT_N, 16, 576).bfloat16(),
        "k_cache": torch.zeros(PAGES, page, 1, 656, dtype=torch.uint8),
        "index_q": torch.zeros(BATCH, NEXT_N, 24, 128, dtype=torch.uint8),
        "index_cache": torch.zeros(PAGES, page, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(ROWS, 24),
        "context_lens": torch.zeros(BATCH, NEXT_N, dtype=torch.int32),
        "block_table": torch.zeros(BATCH, 13, dtype=torch.int32),
    }


def step(kernels, plan, page=PAGE, **changes):
    return kernels.decode_step(**{**inputs(page), **changes}, plan=plan)


def blocks(kernels, driver):
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [(plans[r.symbol].variant, unpack(r.block, plans[r.symbol])) for r in driver.launches]


def test_a_layer_chooses_and_others_use():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS, overlap=True)
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
    text = r"^\[T-22\] candidates: the KV cache has pages of 32 tokens, and the blocks were chosen .* has pages of 16"
    with pytest.raises(GuardError, match=text):
        step(kernels, plan, page=32, candidates="use")
    nothing = dict.fromkeys(("index_q", "index_cache", "weights", "context_lens", "block_table"))
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: given with reuse_ids"):
        step(kernels, plan, candidates="use", reuse_ids=True, **nothing)
    plain = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: the plan has none: pass candidate_blocks"):
        step(kernels, plain, candidates="choose")
    for wanted, message in ((0, r"\[T-22\] candidate_blocks: 0: a token has 1"), (True, r"\[T-12\] candidate_blocks")):
        with pytest.raises(GuardError, match=f"^{message}"):
            kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, candidate_blocks=wanted)
    with pytest.raises(GuardError, match=r"^\[TK-04\] candidate_blocks: 5000, the spec declares a capacity of 4096"):
        kernels.plan_decode_step(BATCH, NEXT_N, 1 << 17, candidate_blocks=5000)
    for forms in (["paged", "blocks"], ["paged", "candidates"]):
        _, without = make(forms=forms)
        with pytest.raises(GuardError, match=r"^\[T-11\] candidate_blocks: the spec \w+ declares index.forms"):
            without.plan_decode_step(BATCH, NEXT_N, WIDTH, candidate_blocks=SLOTS)


def test_a_plan_counts_and_keeps_the_memory_of_its_blocks():
    driver, kernels = make()
    plain = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    level = plan.candidates
    assert plan.workspace_bytes == plain.workspace_bytes + level.memory.numel()
    parts = (level.block_scores, level.block_counts, level.blocks, level.pages, level.compact)
    first, last = level.memory.data_ptr(), level.memory.data_ptr() + level.memory.numel()
    assert all(first <= part.data_ptr() <= last - part.element_size() * part.numel() for part in parts)
    kept = []
    driver.keep_for_stream = lambda ordinal, tensor: kept.append(tensor.data_ptr())
    step(kernels, plan, candidates="choose")
    assert {plan.workspace.data_ptr(), level.memory.data_ptr()} <= set(kept)


def test_what_layers_write_of_blocks_is_poisoned_on_request(monkeypatch):
    monkeypatch.setenv("DSAGEN_POISON_WORKSPACE", "1")
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    level = plan.candidates
    level.memory.zero_()
    step(kernels, plan, candidates="choose")
    assert level.block_scores.isnan().all() and level.compact.isnan().all()
    assert all(part.eq(-1).all() for part in (level.blocks, level.pages, level.block_counts))
    level.memory.zero_()
    step(kernels, plan, candidates="use")
    assert level.compact.isnan().all() and not level.blocks.any() and not level.pages.any()


# ---- what tracers see: ops whose candidate blocks lie in the caller's memory


def op_arguments(kernels, slots=SLOTS, **changes):
    rows = {"blocks": torch.zeros(ROWS, slots, dtype=torch.int32), "pages": torch.zeros(ROWS, slots, dtype=torch.int32)}
    given = {
        **inputs(),
        "kernels": kernels.handle,
        "max_seq_len": WIDTH,
        "k": K,
        "out": torch.zeros(BATCH, NEXT_N, 16, 512).bfloat16(),
        "lse": torch.zeros(BATCH, NEXT_N, 16).transpose(1, 2),
        "ids": torch.zeros(BATCH, NEXT_N, K, dtype=torch.int32),
        "counts": torch.zeros(BATCH, NEXT_N, dtype=torch.int32),
    }
    return {**given, **rows, **changes}


def test_ops_launch_what_steps_do_with_blocks_of_the_caller():
    driver, kernels = make()
    given = op_arguments(kernels)
    torch.ops.dsagen.decode_step_choose_out(**given)
    (scored, _), (_, choice), (_, topk), *_ = blocks(kernels, driver)
    assert (scored.kernel, choice["out"], choice["raw"], choice["k"]) == (
        "blocks", given["pages"].data_ptr(), given["blocks"].data_ptr(), SLOTS
    )  # fmt: skip
    assert topk["out"] == given["ids"].data_ptr()
    del driver.launches[:]
    torch.ops.dsagen.decode_step_use_out(**given)
    (scored, logits), (_, topk), *_ = blocks(kernels, driver)
    assert (scored.kernel, logits["candidates"]) == ("candidates", given["blocks"].data_ptr())
    assert (topk["page_table"], topk["out"]) == (given["pages"].data_ptr(), given["ids"].data_ptr())


@pytest.mark.parametrize("op", ["decode_step_choose_out", "decode_step_use_out"])
def test_ops_refuse_blocks_that_do_not_fit(op):
    _, kernels = make()
    for changes, text in (
        ({"pages": torch.zeros(ROWS, SLOTS - 1, dtype=torch.int32)}, r"\[T-06\] pages: shape \(6, 4\)"),
        ({"blocks": torch.zeros(ROWS, SLOTS)}, r"\[T-04\] blocks: dtype float32"),
        ({"blocks": torch.zeros(SLOTS, dtype=torch.int32)}, r"\[T-05\] blocks: "),
        ({"slots": 14}, r"\[T-22\] blocks: 14 slots, and rows of max_seq_len keys have 13 blocks"),
        ({"blocks": torch.zeros(1, SLOTS, dtype=torch.int32)}, r"\[T-06\] blocks: shape \(1, 5\)"),
    ):
        with pytest.raises(GuardError, match=f"^{text}"):
            getattr(torch.ops.dsagen, op)(**op_arguments(kernels, **changes))


def test_blocks_on_another_device_are_told_by_their_names():
    there, here = (torch.zeros(ROWS, SLOTS, dtype=torch.int32, device=device) for device in ("meta", "cpu"))
    for tensors, text in (((there, here), "blocks: on meta, q is on cpu"), ((here, there), "pages: on meta, q is on")):
        with pytest.raises(GuardError, match=rf"^\[T-03\] {text}"):
            StepBlocks("use", *tensors).slots(ROWS, torch.device("cpu"))


def test_traced_layers_use_what_was_chosen_alone(monkeypatch):
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K, candidate_blocks=SLOTS)
    plain = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for wrong, which, text in (
        ("use", plan, "none were chosen with this plan yet"),
        ("all", plan, "expected 'choose' or 'use'"),
        ("choose", plain, "the plan has none"),
    ):
        with pytest.raises(GuardError, match=rf"^\[T-22\] candidates: {text}"):
            step(kernels, which, candidates=wrong)
    for which in (plan, plain):
        here, which.device = which.device, torch.device("meta")
        with pytest.raises(
            GuardError, match=r"^\[T-09\] plan: made for device meta, q is on cpu: make a plan for it with"
        ):
            step(kernels, which, candidates="choose" if which is plan else None)
        which.device = here
    plan.has_ids = True
    nothing = dict.fromkeys(("index_q", "index_cache", "weights", "context_lens", "block_table"))
    with pytest.raises(GuardError, match=r"^\[T-22\] candidates: given with reuse_ids"):
        step(kernels, plan, candidates="use", reuse_ids=True, **nothing)
