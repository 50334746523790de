"""Decode steps through the runtime: what stages are launched with, shared plans, every argument that does not fit."""

import copy
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins, take_registers_of_steps, unpack
from native_driver import COMPILER, NativeFakeDriver

from dsagen.errors import DsagenError, FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

BATCH, NEXT_N, PAGES, PAGE, WIDTH, K = 3, 2, 20, 16, 100, 32
OPS = ["indexer_logits", "topk", "sparse_decode"]
ONE_CACHE = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": OPS, "index": {"heads": 24}, "topk": 64}
TWO_CACHES = {
    "model": "v41", "heads": 16, "archs": ["sm_90a"], "ops": OPS, "topk": 48,
    "extra_kv": {"format": "v41_fp4", "topk": 64}, "index": {"heads": 24, "keys": "fp8"},
}  # fmt: skip


NESTED = torch.nested.nested_tensor([torch.zeros(NEXT_N, 16)] * BATCH)


def make(spec=ONE_CACHE, driver=FakeDriver, **changes):
    fake = driver()
    # As many registers as each kernel's plan reckons with.
    take_registers_of_steps(fake)
    return fake, Kernels(load_spec({**spec, **changes}), open_driver=lambda: fake, read=fake_cubins)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def bytes_of(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


def index(**changes: Any) -> dict[str, Any]:
    given = {
        "index_q": bytes_of(BATCH, NEXT_N, 24, 128),
        "index_cache": bytes_of(PAGES, PAGE, 1, 132),
        "weights": torch.zeros(BATCH * NEXT_N, 24),
        "context_lens": ints(BATCH, NEXT_N),
        "block_table": ints(BATCH, 7),
    }
    return {**given, **changes}


def attention(**changes: Any) -> dict[str, Any]:
    given = {"q": torch.zeros(BATCH, NEXT_N, 16, 576).bfloat16(), "k_cache": bytes_of(PAGES, PAGE, 1, 656)}
    return {**given, **changes}


def two_caches(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(BATCH, NEXT_N, 16, 512).bfloat16(),
        "k_cache": bytes_of(4, 64, 1, 528),
        "indices": ints(BATCH, NEXT_N, 48),
        "extra_k_cache": bytes_of(PAGES, PAGE, 1, 288),
    }
    return {**given, **changes}


def blocks(kernels, driver):
    """The argument block of each launch, by name and field, in order."""
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [(plans[r.symbol].variant.family, unpack(r.block, plans[r.symbol])) for r in driver.launches]


def test_scales_of_the_query_reach_the_indexer():
    driver, kernels = make(index={"heads": 24, "dim": 128, "keys": "mxfp4"})
    plan, scales = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K), ints(BATCH, NEXT_N, 24)
    given = index(index_q=bytes_of(BATCH, NEXT_N, 24, 64), index_cache=bytes_of(PAGES, PAGE, 1, 68))
    kernels.decode_step(**attention(), **given, index_q_scales=scales, plan=plan)
    assert blocks(kernels, driver)[0][1]["q_scales"] == scales.data_ptr()
    with pytest.raises(GuardError, match=r"^\[T-23\] index_q_scales: missing, and mxfp4 codes of"):
        kernels.decode_step(**attention(), **given, plan=plan)
    with pytest.raises(GuardError, match=r"^\[T-22\] index_q_scales: given with reuse_ids"):
        kernels.decode_step(**attention(), index_q_scales=scales, reuse_ids=True, plan=plan)
    _, ragged = make(index={"heads": 24, "forms": ["ragged"]})
    with pytest.raises(GuardError, match=r"^\[T-11\] decode_step: the spec \w+ declares index.forms ragged: add paged"):
        ragged.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)


def test_a_step_launches_its_stages_over_one_workspace():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    given, own = index(), attention()
    out, lse = kernels.decode_step(**own, **given, plan=plan)
    assert (out.shape, lse.shape) == ((BATCH, NEXT_N, 16, 512), (BATCH, 16, NEXT_N))
    (scored, logits), (selected, topk), *rest = blocks(kernels, driver)
    assert (scored, selected, rest[0][0]) == ("indexer_logits", "topk", "sparse_decode")
    decode = rest[0][1]
    assert (logits["scores"], logits["unscored"], logits["width"]) == (plan.scores.data_ptr(), K, WIDTH)
    assert (topk["scores"], topk["k"], topk["rows"], topk["page_size"]) == (logits["scores"], K, 6, PAGE)
    assert (topk["lengths"], topk["page_table"]) == (given["context_lens"].data_ptr(), given["block_table"].data_ptr())
    assert (topk["table_of_row"], topk["out"]) == (plan.row_tables.data_ptr(), plan.ids.data_ptr())
    assert (decode["indices"], decode["topk_length"]) == (plan.ids.data_ptr(), plan.counts.data_ptr())
    assert (decode["topk"], topk["counts"]) == (K, decode["topk_length"])
    assert plan.row_tables.tolist() == [0, 0, 1, 1, 2, 2]
    first, last = plan.workspace.data_ptr(), plan.workspace.data_ptr() + plan.workspace_bytes
    for tensor in (plan.scores, plan.ids, plan.counts, plan.token_lengths, plan.row_tables):
        assert first <= tensor.data_ptr() < last and tensor.data_ptr() % 512 == 0
    assert plan.scores.shape == (6, WIDTH) and plan.ids.shape == (BATCH, NEXT_N, K)
    assert plan.workspace_bytes == kernels.decode_step_workspace_bytes(BATCH, NEXT_N, WIDTH, k=K)


def test_rows_of_scores_begin_where_top_k_reads_fastest():
    for scores, columns in (("fp32", 104), ("bf16", 104)):
        _, kernels = make(scores=scores)
        assert kernels.plan_decode_step(BATCH, NEXT_N, 101, k=K).scores.stride(0) == columns


def test_layers_may_share_what_one_has_selected():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    with pytest.raises(GuardError, match=r"^\[T-22\] reuse_ids: nothing was selected with this plan yet"):
        kernels.decode_step(**attention(), plan=plan, reuse_ids=True)
    kernels.decode_step(**attention(), **index(), plan=plan)
    count = len(driver.launches)
    other = attention()
    kernels.decode_step(**other, plan=plan, reuse_ids=True)
    later = blocks(kernels, driver)[count:]
    assert {family for family, _ in later} == {"sparse_decode"}
    assert later[0][1]["q"] == other["q"].data_ptr() and later[0][1]["indices"] == plan.ids.data_ptr()
    for name, tensor in {**index(), "kv_block_table": ints(BATCH, 7)}.items():
        with pytest.raises(GuardError, match=rf"^\[T-22\] {name}: given with reuse_ids"):
            kernels.decode_step(**attention(), plan=plan, reuse_ids=True, **{name: tensor})
    with pytest.raises(GuardError, match=r"^\[T-12\] reuse_ids: expected True or False"):
        kernels.decode_step(**attention(), plan=plan, reuse_ids=1)


def test_one_length_a_request_is_that_of_its_last_token():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    kernels.decode_step(**attention(), **index(context_lens=torch.tensor([5, 0, 90]).int()), plan=plan)
    assert plan.token_lengths.tolist() == [[4, 5], [-1, 0], [89, 90]]
    (_, logits), (_, topk), *_ = blocks(kernels, driver)
    assert logits["lens"] == topk["lengths"] == plan.token_lengths.data_ptr() and logits["per_token"] == 1
    # Of one token there is nothing to work out.
    plan, lens = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K), ints(BATCH)
    one = index(index_q=bytes_of(BATCH, 1, 24, 128), weights=torch.zeros(BATCH, 24), context_lens=lens)
    kernels.decode_step(**attention(q=torch.zeros(BATCH, 1, 16, 576).bfloat16()), **one, plan=plan)
    (_, logits), (_, topk), *_ = blocks(kernels, driver)[-3:]
    assert logits["lens"] == topk["lengths"] == lens.data_ptr()


def test_the_kv_cache_may_have_pages_of_its_own():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    table = ints(BATCH, 2)
    kernels.decode_step(**attention(k_cache=bytes_of(3, 61, 1, 656)), **index(), kv_block_table=table, plan=plan)
    (_, logits), (_, topk), *_ = blocks(kernels, driver)
    assert (logits["page_size"], topk["page_size"], topk["page_table"]) == (PAGE, 61, table.data_ptr())


def test_with_two_caches_the_selection_is_the_second_ones():
    driver, kernels = make(TWO_CACHES)
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    given = two_caches(topk_length=ints(BATCH))
    kernels.decode_step(**given, **index(), plan=plan)
    decode = blocks(kernels, driver)[2][1]
    assert (decode["indices"], decode["extra_indices"]) == (given["indices"].data_ptr(), plan.ids.data_ptr())
    assert (decode["topk"], decode["extra_topk"], decode["extra_topk_length"]) == (48, K, plan.counts.data_ptr())
    for name in ("indices", "extra_k_cache"):
        with pytest.raises(GuardError, match=rf"^\[T-17\] {name}: missing: of the spec's two caches"):
            kernels.decode_step(**two_caches(**{name: None}), **index(), plan=plan)
    text = r"^\[T-22\] extra_k_cache: pages of 8 tokens, index_cache has pages of 16"
    with pytest.raises(GuardError, match=text):
        kernels.decode_step(**two_caches(extra_k_cache=bytes_of(PAGES, 8, 1, 288)), **index(), plan=plan)
    assert kernels.plan_decode_step(1, 1, WIDTH, window=20).attention.topk == 20


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("next_n", [1, 2])
def test_later_steps_are_launched_by_the_launcher_in_c_alone(next_n, monkeypatch):
    driver, kernels = make(driver=NativeFakeDriver)
    plan = kernels.plan_decode_step(BATCH, next_n, WIDTH, k=K)
    given = index(
        index_q=bytes_of(BATCH, next_n, 24, 128),
        weights=torch.zeros(BATCH * next_n, 24),
        context_lens=ints(BATCH, next_n),
    )
    own = attention(q=torch.zeros(BATCH, next_n, 16, 576).bfloat16())
    first = [kernels.decode_step(**own, **given, plan=plan), list(driver.launches)]
    monkeypatch.setattr("dsagen.runtime.launch.OpLaunches.launch", lambda *_: pytest.fail("was checked again"))
    driver.launches.clear()
    again = [kernels.decode_step(**own, **given, plan=plan), list(driver.launches)]
    assert [r.symbol for r in first[1]] == [r.symbol for r in again[1]] and len(again[1]) >= 3


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"plan": None}, "[T-09] plan: was not made by these kernels"),
    ({"q": torch.zeros(BATCH, 1, 16, 576).bfloat16()}, "[T-09] plan: made for batch 3, next_n 2, q has (3, 1)"),
    ({"index_q": bytes_of(2, NEXT_N, 24, 128)}, "[T-09] plan: made for batch 3, next_n 2, index_q has (2, 2)"),
    ({"q": torch.zeros(BATCH, NEXT_N, 8, 576).bfloat16()}, "[SD-"),
    ({"k_cache": bytes_of(PAGES, 61, 1, 656)}, "[T-22] k_cache: pages of 61 tokens, index_cache has pages of 16"),
    ({"k_cache": bytes_of(PAGES - 1, PAGE, 1, 656)}, "[T-22] k_cache: 19 pages, index_cache has 20"),
    ({"k_cache": bytes_of(PAGES, PAGE, 656)}, "[T-05] k_cache: 3 dims"),
    ({"k_cache": bytes_of(PAGES, PAGE, 1, 576)}, "[T-06] k_cache: shape"),
    ({"k_cache": None}, "[T-01] k_cache: expected a torch.Tensor, found NoneType"),
    ({"index_q": None}, "[T-01] index_q: expected a torch.Tensor, found NoneType"),
    ({"index_q": torch.zeros(BATCH, NEXT_N, 24, 128)}, "[T-04] index_q: dtype float32, expected float8_e4m3fn"),
    ({"index_q": bytes_of(BATCH, NEXT_N, 16, 128)}, "[T-06] index_q: shape (3, 2, 16, 128), expected"),
    ({"index_cache": None}, "[T-01] index_cache: expected a torch.Tensor"),
    ({"index_cache": bytes_of(PAGES, PAGE, 1, 68)}, "[T-06] index_cache: shape (20, 16, 1, 68), expected"),
    ({"index_cache": bytes_of(PAGES, PAGE, 132)}, "[T-05] index_cache: 3 dims"),
    ({"index_cache": torch.zeros(PAGES, PAGE, 1, 132)}, "[T-04] index_cache: dtype float32"),
    ({"weights": None}, "[T-01] weights: expected a torch.Tensor"),
    ({"weights": torch.zeros(BATCH, 24)}, "[T-06] weights: shape (3, 24)"),
    ({"weights": torch.zeros(BATCH * NEXT_N, 24).bfloat16()}, "[T-04] weights: dtype bfloat16"),
    ({"context_lens": None}, "[T-01] context_lens: expected a torch.Tensor"),
    ({"context_lens": ints(BATCH, NEXT_N).long()}, "[T-04] context_lens: dtype int64"),
    ({"context_lens": ints(BATCH).long()}, "[T-04] context_lens: dtype int64"),
    ({"context_lens": ints(BATCH, 1)}, "[T-06] context_lens: shape (3, 1)"),
    ({"context_lens": ints(NEXT_N)}, "[T-06] context_lens: shape (2,)"),
    ({"context_lens": ints(BATCH, 4)[:, :NEXT_N]}, "[T-22] context_lens: strides (4, 1), and top-k reads adjacent"),
    ({"block_table": None}, "[T-01] block_table: expected a torch.Tensor"),
    ({"block_table": ints(BATCH, 7).long()}, "[T-04] block_table: dtype int64"),
    ({"block_table": ints(BATCH * NEXT_N, 7)}, "[T-06] block_table: shape (6, 7)"),
    ({"block_table": ints(BATCH * 7)}, "[T-05] block_table: 1 dims"),
    ({"block_table": ints(BATCH, 6)}, "[T-22] block_table: rows of 6 pages of 16 tokens name fewer than the plan's"),
    ({"kv_block_table": ints(BATCH, 6)}, "[T-22] kv_block_table: rows of 6 pages of 16 tokens name fewer"),
    ({"kv_block_table": ints(BATCH, 7).long()}, "[T-04] kv_block_table: dtype int64"),
    ({"kv_block_table": ints(BATCH * 7)}, "[T-05] kv_block_table: 1 dims"),
    *(
        (
            {"kv_block_table": ints(rows, 7)},
            f"[T-06] kv_block_table: shape ({rows}, 7), expected [batch, pages] = (3, *)",
        )
        for rows in (0, 1, 2, 4, BATCH * NEXT_N)
    ),
    ({"kv_block_table": 3}, "[T-01] kv_block_table: expected a torch.Tensor, found int"),
    *(
        ({name: NESTED}, f"[T-14] {name}: is a nested tensor: pass a plain strided tensor")
        for name in ("q", "k_cache", "index_q", "index_cache", "context_lens", "block_table", "kv_block_table")
    ),
    (
        {"candidates": torch.zeros(3)},
        "[T-22] candidates: expected 'choose' or 'use', or None for all keys, found tensor",
    ),
    ({"indices": ints(BATCH, NEXT_N, K)}, "[T-17] indices: the spec declares no extra_kv, and decode_step selects"),
    ({"topk_length": ints(BATCH)}, "[T-17] topk_length: the spec declares no extra_kv"),
    ({"extra_k_cache": bytes_of(PAGES, PAGE, 1, 288)}, "[T-17] extra_k_cache: the spec declares no extra_kv"),
    ({"attn_sink": torch.zeros(3)}, "[T-06] attn_sink"),
    ({"softmax_scale": "1"}, "[T-12] softmax_scale"),
    ({"out": torch.zeros(BATCH, NEXT_N, 16, 512)}, "[T-04] out: dtype float32"),
)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_does_not_fit_is_named(changes, message):
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    # At first, and behind calls that did.
    for _ in range(2):
        with pytest.raises(GuardError) as caught:
            kernels.decode_step(**{**attention(), **index(), "plan": plan, **changes})
        assert str(caught.value).startswith(message)
        kernels.decode_step(**attention(), **index(), plan=plan)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((BATCH, NEXT_N, WIDTH), {"k": 65}, r"\[TK-04\] k: 65, the spec declares a capacity of 64"),
        ((BATCH, NEXT_N, WIDTH), {"k": 0}, r"\[TK-04\] k: 0"),
        ((BATCH, NEXT_N, WIDTH), {"k": 1.5}, r"\[T-12\] k: expected a whole number"),
        ((BATCH, 9, WIDTH), {}, r"\[IL-05\] batch, next_n: 3 requests of 9 tokens"),
        ((BATCH, NEXT_N, 2**31), {}, r"\[IL-06\] max_seq_len: 2147483648"),
        ((0, NEXT_N, WIDTH), {}, r"\[T-22\] batch: 0: a step has 1"),
        ((BATCH, NEXT_N, 0), {}, r"\[T-22\] max_seq_len: 0: a step has 1"),
        ((BATCH, NEXT_N, "9"), {}, r"\[T-12\] max_seq_len: expected a whole number"),
        ((BATCH, NEXT_N, WIDTH), {"window": 3}, r"\[T-22\] window: the spec declares no extra_kv"),
        ((BATCH, NEXT_N, WIDTH), {"num_splits": 0}, r"\[SD-"),
        ((BATCH, NEXT_N, WIDTH), {"determinism": "some"}, r"\[T-12\] determinism"),
        ((BATCH, NEXT_N, WIDTH), {"determinism": torch.zeros(3)}, r"\[T-12\] determinism: expected one of off, set"),
        ((BATCH, NEXT_N, WIDTH), {"workspace": bytes_of(100)}, r"\[T-22\] workspace: 100 B at "),
        ((BATCH, NEXT_N, WIDTH), {"workspace": ints(1 << 16)}, r"\[T-04\] workspace: dtype int32"),
    ],
)
def test_plans_that_cannot_be(sizes, options, message):
    _, kernels = make()
    with pytest.raises(GuardError, match=f"^{message}"):
        kernels.plan_decode_step(*sizes, **options)


def test_a_plan_is_of_its_kernels_stream_and_process():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    _, others = make()
    with pytest.raises(GuardError, match=r"^\[T-09\] plan: was not made by these kernels"):
        others.decode_step(**attention(), **index(), plan=plan)
    kernels.decode_step(**attention(), **index(), plan=plan)
    count, driver.stream = len(driver.launches), 7
    for reuse in ({}, {"reuse_ids": True}):
        with pytest.raises(GuardError, match=r"^\[T-10\] plan: belongs to stream 0x0, the current stream is 0x7"):
            kernels.decode_step(**attention(), **({} if reuse else index()), **reuse, plan=plan)
    assert len(driver.launches) == count, "nothing of the step may run beside another stream's"
    plan.rebind()
    kernels.decode_step(**attention(), **index(), plan=plan)
    driver.capturing = True
    with pytest.raises(FrozenError, match="making a plan during CUDA graph capture is not possible"):
        kernels.plan_decode_step(BATCH, NEXT_N, WIDTH)
    with pytest.raises(DsagenError, match="neither copied nor pickled"):
        copy.copy(plan)


def test_memory_may_be_lent():
    _, kernels = make()
    size = kernels.decode_step_workspace_bytes(BATCH, NEXT_N, WIDTH)
    lent = bytes_of(size + 1024)
    lent = lent[-lent.data_ptr() % 512 :]
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, workspace=lent)
    assert plan.workspace.data_ptr() == lent.data_ptr() and plan.workspace_bytes == size
    assert plan.ids.eq(-1).all() and not plan.counts.any()
    kernels.decode_step(**attention(), **index(), plan=plan)
    with pytest.raises(GuardError, match=r"^\[T-22\] workspace: "):
        kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, workspace=lent[256:])


def test_steps_need_all_three_ops():
    for missing in OPS:
        ops = [op for op in OPS if op != missing]
        changes = {key: None for key in ("index",) if "indexer_logits" not in ops}
        _, kernels = make(ops=ops, **changes)
        with pytest.raises(GuardError, match=rf"^\[T-11\] {missing}: the spec v32_h16 declares ops"):
            kernels.plan_decode_step(BATCH, NEXT_N, WIDTH)


def test_batch_invariant_specs_attend_in_order():
    assert make()[1].plan_decode_step(1, 1, WIDTH).determinism == "set"
    invariant = make(determinism="batch_invariant")[1]
    assert invariant.plan_decode_step(1, 1, WIDTH).determinism == "order"
    assert invariant.plan_decode_step(1, 1, WIDTH, determinism="set").determinism == "set"


def test_lengths_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    lens = torch.tensor([[1, 2], [3, WIDTH + 1], [0, 0]]).int()
    with pytest.raises(GuardError, match=r"^\[IL-14\] context_lens: token 1 of request 1 sees 101 keys"):
        kernels.decode_step(**attention(), **index(context_lens=lens), plan=plan)
    assert not driver.launches


def test_results_are_poisoned_on_request(monkeypatch):
    monkeypatch.setenv("DSAGEN_POISON_WORKSPACE", "1")
    _, kernels = make()
    plan = kernels.plan_decode_step(BATCH, NEXT_N, WIDTH, k=K)
    plan.scores.zero_()
    plan.ids.zero_()
    kernels.decode_step(**attention(), **index(), plan=plan)
    assert plan.scores.isnan().all() and plan.ids.eq(-1).all() and plan.counts.eq(-1).all()
    assert plan.row_tables.tolist() == [0, 0, 1, 1, 2, 2]
    plan.ids.zero_()
    kernels.decode_step(**attention(), plan=plan, reuse_ids=True)
    assert not plan.ids.any(), "a layer that selects nothing keeps what it attends to"


def test_explain_of_a_step():
    _, kernels = make()
    text = kernels.explain("decode_step", batch=BATCH, s_q=NEXT_N, width=WIDTH, topk=K)
    assert "indexer_logits -> topk -> sparse_decode: 32 of up to 100 keys for each of 6 tokens" in text
    for part in (
        "kernel: indexer_logits-main",
        "shape: 6 rows of 100 scores, k 32",
        "batch 3, s_q 2, heads 16, topk 32",
        "top-k begins behind the scores; launches overlap from 64 requests on",
    ):
        assert part in text
    size = kernels.decode_step_workspace_bytes(BATCH, NEXT_N, WIDTH, k=K)
    assert text.endswith(f"workspace of the step: {size} B, 2560 B of them scores")
    with pytest.raises(GuardError, match=r"^\[T-16\] width: missing, and what a call of decode_step takes"):
        kernels.explain("decode_step", batch=1)
    both = make(TWO_CACHES)[1].explain("decode_step", batch=1, width=WIDTH)
    assert "topk 48 + 64 of the second cache" in both and "64 of up to 100 keys" in both


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (ONE_CACHE, {"s_q": 0}, r"^\[T-22\] s_q: 0: a step has 1 at least"),
        (ONE_CACHE, {"s_q": 9}, r"^\[IL-05\] batch, s_q: 1 requests of 9 tokens"),
        (ONE_CACHE, {"width": -3}, r"^\[T-22\] width: -3: a step has 1 at least"),
        (ONE_CACHE, {"topk": 99}, r"^\[TK-04\] topk: 99, the spec declares a capacity of 64"),
        (ONE_CACHE, {"extra_topk": 9}, r"^\[T-16\] extra_topk: nothing that a call of decode_step takes depends on it"),
        (TWO_CACHES, {"extra_topk": 99}, r"^\[TK-04\] extra_topk: 99, the spec declares a capacity of 64"),
    ],
)
def test_explain_of_a_step_names_its_own_arguments(spec, sizes, message):
    with pytest.raises(GuardError, match=message):
        make(spec)[1].explain("decode_step", **{"batch": 1, "width": WIDTH, **sizes})


def call_op(kernels, variant="", **changes):
    """The op of torch, by name of its arguments."""
    op = getattr(torch.ops.dsagen, "decode_step" + variant)
    given = {**attention(), **index(), "kernels": kernels.handle, "max_seq_len": WIDTH, "k": K}
    return op(**{**given, **changes})


def test_steps_without_a_plan_share_one():
    driver, kernels = make()
    out, lse, ids, counts = call_op(kernels)
    assert (out.shape, lse.shape) == ((BATCH, NEXT_N, 16, 512), (BATCH, 16, NEXT_N))
    assert (ids.shape, counts.shape, ids.dtype, counts.dtype) == ((3, 2, K), (3, 2), torch.int32, torch.int32)
    (_, logits), (_, topk), (_, decode), *_ = blocks(kernels, driver)
    assert (topk["out"], topk["counts"]) == (ids.data_ptr(), counts.data_ptr())
    assert (decode["indices"], decode["topk_length"]) == (ids.data_ptr(), counts.data_ptr())
    assert [r.config.overlaps_previous for r in driver.launches] == [False, False, True]
    del driver.launches[:]
    call_op(kernels, overlap=True)
    assert [r.config.overlaps_previous for r in driver.launches] == [False, True, True]
    del driver.launches[:]
    call_op(kernels)
    call_op(kernels, num_splits=1)
    call_op(kernels)
    scores = [block["scores"] for family, block in blocks(kernels, driver) if family == "indexer_logits"]
    assert scores[0] == scores[2] == logits["scores"] != scores[1], "one workspace for steps of one shape"
    driver.capturing, driver.stream = True, 9
    with pytest.raises(FrozenError, match="making a plan during CUDA graph capture is not possible"):
        call_op(kernels)
    driver.stream = 0
    call_op(kernels)
    driver.capturing = False
    for _ in range(70):
        call_op(kernels, max_seq_len=WIDTH - _)
    call_op(kernels)
    scores = [block["scores"] for family, block in blocks(kernels, driver) if family == "indexer_logits"]
    assert scores[-1] == scores[0], "a captured graph holds its address"


def test_with_two_caches_an_op_selects_from_the_second():
    driver, kernels = make(TWO_CACHES)
    given = two_caches()
    ids, counts = ints(BATCH, NEXT_N, K), ints(BATCH, NEXT_N)
    out, lse = torch.zeros(BATCH, NEXT_N, 16, 512).bfloat16(), torch.zeros(BATCH, 16, NEXT_N)
    call_op(kernels, "_out", **given, out=out, lse=lse, ids=ids, counts=counts)
    decode = blocks(kernels, driver)[2][1]
    assert (decode["indices"], decode["extra_indices"]) == (given["indices"].data_ptr(), ids.data_ptr())
    assert (decode["extra_topk_length"], decode["out"]) == (counts.data_ptr(), out.data_ptr())
    for changes, message in (
        ({"ids": ints(BATCH, NEXT_N, K + 1)}, r"\[T-06\] ids: shape \(3, 2, 33\)"),
        ({"ids": ints(BATCH, NEXT_N, 2 * K)[..., :K]}, r"\[T-22\] ids: strides \(128, 64, 1\), and top-k"),
        ({"counts": ints(BATCH, NEXT_N).long()}, r"\[T-04\] counts: dtype int64"),
        ({"q": torch.zeros(3)}, r"\[T-05\] q: 1 dims, expected \[batch, next_n, heads, d_qk\]"),
        ({"indices": None}, r"\[T-17\] indices: missing"),
        ({"k": 65}, r"\[TK-04\] k: 65"),
        ({"determinism": "some"}, r"\[T-12\] determinism"),
    ):
        results = {"out": out, "lse": lse, "ids": ids, "counts": counts}
        with pytest.raises(GuardError, match=f"^{message}"):
            call_op(kernels, "_out", **{**given, **results, **changes})
