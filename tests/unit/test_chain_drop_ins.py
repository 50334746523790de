"""Stand-ins for deep_gemm, sgl_kernel and flashinfer: signatures, arguments, whose kernels serve, what they refuse."""

import inspect
from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

import dsagen.compat.deployments as deployments
from dsagen.compat import deep_gemm, deep_gemm_legacy, flashinfer, sgl_kernel
from dsagen.compat.logits import INDEXERS
from dsagen.compat.selection import SELECTIONS
from dsagen.errors import DeviceError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

ROWS, WIDTH, B, N, H, D = 6, 100, 3, 2, 16, 64
SPEC = {"model": "v32", "heads": 8, "archs": ["sm_90a"], "ops": ["topk", "indexer_logits"], "topk": 64}
F32 = torch.float32


NESTED = torch.nested.nested_tensor([torch.zeros(WIDTH)] * ROWS)


def make(**changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=60))
    spec = load_spec({**SPEC, "index": {"heads": H, "dim": D, "forms": ["paged", "ragged"]}, **changes})
    return driver, Kernels(spec, open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture(autouse=True)
def served():
    driver, kernels = make()
    SELECTIONS.use(kernels)
    INDEXERS.use(kernels)
    yield driver, kernels
    SELECTIONS.forget()
    INDEXERS.forget()


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def block(served):
    driver, kernels = served
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    record = driver.launches[-1]
    return unpack(record.block, plans[record.symbol])


# Names, order and defaults are what engines call by; None of a default means that there is none.
SIGNATURES = {
    sgl_kernel.fast_topk_v2: "score lengths topk row_starts=None",
    sgl_kernel.fast_topk_transform_fused: "score lengths page_table_size_1 cu_seqlens_q topk row_starts=None",
    sgl_kernel.fast_topk_transform_ragged_fused: "score lengths topk_indices_offset topk row_starts=None",
    sgl_kernel.deepseek_v4_topk_transform_512: "scores seq_lens page_table page_indices page_size raw_indices=None "
    "sort_output=False",
    flashinfer.top_k_page_table_transform: "input src_page_table lengths k row_to_batch=None deterministic=False "
    "tie_break=0 dsa_graph_safe=False row_starts=None page_table_row_starts=None *page_size=1 *out=None "
    "*out_raw_indices=None",
    flashinfer.top_k_ragged_transform: "input offsets lengths k deterministic=False tie_break=0 dsa_graph_safe=False "
    "row_starts=None",
    deep_gemm_legacy.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms indices=None",
    deep_gemm_legacy.fp8_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "clean_logits=False indices=None",
    deep_gemm_legacy.fp8_fp4_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta "
    "max_context_len clean_logits=False logits_dtype=torch.float32 indices=None",
    deep_gemm.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms indices=None",
    deep_gemm.fp8_fp4_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "indices=None",
    deep_gemm.get_num_sms: "",
    deep_gemm_legacy.fp8_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True "
    "max_seqlen_k=0",
    deep_gemm_legacy.fp8_fp4_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True "
    "max_seqlen_k=0 logits_dtype=torch.float32",
    deep_gemm.fp8_fp4_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end max_seqlen_k schedule_meta=None",
    deep_gemm.get_mqa_logits_metadata: "cu_seq_len_k_start cu_seq_len_k_end num_kv_tokens num_heads",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures(function):
    parts = [
        ("*" if p.kind is inspect.Parameter.KEYWORD_ONLY else "")
        + (name if p.default is inspect.Parameter.empty else f"{name}={p.default}")
        for name, p in inspect.signature(function).parameters.items()
    ]
    assert " ".join(parts) == SIGNATURES[function]


@pytest.mark.parametrize("module", [deep_gemm, deep_gemm_legacy, flashinfer, sgl_kernel])
def test_modules_export_what_they_have(module):
    assert all(callable(getattr(module, name)) for name in module.__all__)


# ---- top-k


def test_topk_calls_become_the_ops(served):
    score, lengths, starts = torch.zeros(ROWS, WIDTH), ints(ROWS), ints(ROWS)
    ids = sgl_kernel.fast_topk_v2(score, lengths, 40, starts)
    found = block(served)
    assert (ids.shape, ids.dtype, found["k"], found["page_table"], found["offsets"]) == (
        (ROWS, 40),
        torch.int32,
        40,
        0,
        0,
    )
    assert (found["lengths"], found["starts"], found["ordered"]) == (lengths.data_ptr(), starts.data_ptr(), 0)
    table = ints(ROWS, WIDTH)
    sgl_kernel.fast_topk_transform_fused(score, lengths, table, ints(ROWS + 1), 40)
    found = block(served)
    assert (found["page_table"], found["page_size"], found["table_of_row"]) == (table.data_ptr(), 1, 0)
    offset = ints(ROWS)
    sgl_kernel.fast_topk_transform_ragged_fused(score, lengths, offset, 40)
    assert block(served)["offsets"] == offset.data_ptr()
    out, raw = ints(ROWS, 50)[:, :48], ints(ROWS, 48)
    assert sgl_kernel.deepseek_v4_topk_transform_512(score, lengths, table, out, 64, raw, True) is None
    found = block(served)
    assert (found["out"], found["out_stride"], found["raw"], found["k"]) == (out.data_ptr(), 50, raw.data_ptr(), 48)
    assert (found["page_size"], found["ordered"]) == (64, 1)


def test_rows_of_a_prefill_find_their_request(served, monkeypatch):
    seen = {}
    monkeypatch.setattr(served[1], "topk", lambda *_, **given: seen.update(given))
    cu = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    sgl_kernel.fast_topk_transform_fused(torch.zeros(ROWS, WIDTH), ints(ROWS), ints(4, WIDTH), cu, 8)
    assert seen["table_of_row"].tolist() == [0, 2, 2, 2, 3, 3] and seen["table_of_row"].dtype == torch.int32


def test_flashinfers_calls_become_the_ops(served):
    score, lengths, table = torch.zeros(ROWS, WIDTH), ints(ROWS), ints(2, 50)
    rows, starts, firsts, out, raw = (ints(*shape) for shape in ((ROWS,), (ROWS,), (ROWS,), (ROWS, 9), (ROWS, 9)))
    options = {"page_size": 4, "out": out, "out_raw_indices": raw}
    given = flashinfer.top_k_page_table_transform(
        score, table, lengths, 9, rows, True, 1, True, starts, firsts, **options
    )
    assert given is out
    found = block(served)
    assert (found["table_of_row"], found["table_starts"], found["raw"]) == tuple(
        t.data_ptr() for t in (rows, firsts, raw)
    )
    assert (found["page_size"], found["ordered"], found["starts"]) == (4, 1, starts.data_ptr())
    # Without pages a row's window begins at the same place of its table.
    flashinfer.top_k_page_table_transform(score, ints(ROWS, 50), lengths, 9, row_starts=starts)
    assert block(served)["table_starts"] == starts.data_ptr()
    offsets = ints(ROWS)
    flashinfer.top_k_ragged_transform(score, offsets, lengths, 9, row_starts=starts)
    found = block(served)
    assert (found["offsets"], found["starts"], found["ordered"]) == (offsets.data_ptr(), starts.data_ptr(), 0)


SCORE, LENGTHS, TABLE = torch.zeros(ROWS, WIDTH), ints(ROWS), ints(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        ("fast_topk_v2", (None, LENGTHS, 9), {}, ": score: expected a torch.Tensor"),
        ("fast_topk_v2", (SCORE[0], LENGTHS, 9), {}, ": score: 1 dims (100,), expected 2"),
        ("fast_topk_v2", (SCORE.half(), LENGTHS, 9), {}, ": score: dtype float16: scores are"),
        ("fast_topk_v2", (SCORE, None, 9), {}, ": lengths: expected a torch.Tensor"),
        ("fast_topk_v2", (SCORE, LENGTHS[:2], 9), {}, ": lengths: 2 rows, expected 6"),
        ("fast_topk_v2", (SCORE, LENGTHS.long(), 9), {}, "[T-04] lengths: dtype int64"),
        ("fast_topk_v2", (SCORE, LENGTHS, 9, LENGTHS[:2]), {}, ": row_starts: 2 rows"),
        ("fast_topk_v2", (SCORE, LENGTHS, 9, LENGTHS.long()), {}, "[T-04] row_starts: dtype int64"),
        ("fast_topk_v2", (SCORE.T.contiguous().T, LENGTHS, 9), {}, "[T-07] score: last dim has stride 6"),
        ("fast_topk_v2", (SCORE, LENGTHS, 0), {}, ": topk: 0: expected how many"),
        ("fast_topk_v2", (SCORE, LENGTHS, 65), {}, "[T-20] score: on cpu: expected a CUDA device"),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE, ints(9), 9),
            {},
            ": cu_seqlens_q: 8 requests of 6 rows",
        ),
        # int8 would count 127 rows, and fp32 has no ids.
        *(
            (
                "fast_topk_transform_fused",
                (SCORE, LENGTHS, TABLE[:2], ints(3).to(dtype), 9),
                {},
                f": cu_seqlens_q: dtype {str(dtype).removeprefix('torch.')}, expected int32: pass cu_seqlens_q.int()",
            )
            for dtype in (torch.int8, torch.int64, torch.float32, torch.bool)
        ),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE[:0], ints(1), 9),
            {},
            ": cu_seqlens_q: shape (1,): expected [requests + 1], a request at least for 6 rows",
        ),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE[:0], ints(0), 9),
            {},
            ": cu_seqlens_q: shape (0,): expected [requests + 1], a request at least for 6 rows",
        ),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE[:2], ints(3).to("meta"), 9),
            {},
            "[T-14] cu_seqlens_q: has no memory",
        ),
        ("fast_topk_v2", (NESTED, LENGTHS, 9), {}, ": score: a tensor of layout nested: pass a plain strided one"),
        ("fast_topk_v2", (SCORE.to_sparse(), LENGTHS, 9), {}, ": score: a tensor of layout sparse_coo"),
        ("fast_topk_v2", (SCORE, NESTED, 9), {}, ": lengths: a tensor of layout nested"),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE, ints(5), 9),
            {},
            ": page_table_size_1: 6 rows, expected 4",
        ),
        (
            "fast_topk_transform_fused",
            (SCORE, LENGTHS, TABLE.long(), ints(7), 9),
            {},
            "[T-04] page_table_size_1: dtype int64",
        ),
        (
            "fast_topk_transform_ragged_fused",
            (SCORE, LENGTHS, LENGTHS.long(), 9),
            {},
            "[T-04] topk_indices_offset: dtype int64",
        ),
        ("deepseek_v4_topk_transform_512", (SCORE, LENGTHS, TABLE, None, 64), {}, ": page_indices"),
        ("deepseek_v4_topk_transform_512", (SCORE, LENGTHS.long(), TABLE, ints(ROWS, 9), 64), {}, "[T-04] seq_lens: "),
        ("deepseek_v4_topk_transform_512", (SCORE, LENGTHS, TABLE, ints(2, 9), 64), {}, "[T-06] page_indices: shape"),
        ("deepseek_v4_topk_transform_512", (SCORE, LENGTHS, TABLE, ints(ROWS, 9), 0), {}, "[TK-07] page_size: 0"),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"page_size": 3}, ": page_size: 3"),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"page_size": True}, "[T-12] page_size: expected"),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"tie_break": 2}, ": tie_break: 2"),
        ("top_k_ragged_transform", (SCORE, LENGTHS, LENGTHS, 9), {"tie_break": torch.zeros(3)}, "[T-12] tie_break: "),
        ("top_k_ragged_transform", (SCORE, LENGTHS, LENGTHS, 9), {"tie_break": True}, "[T-12] tie_break: expected"),
        (
            "top_k_page_table_transform",
            (SCORE, TABLE, LENGTHS, 9),
            {"page_size": 2, "row_starts": LENGTHS},
            ": page_table_row_starts: missing",
        ),
        ("top_k_page_table_transform", (SCORE, TABLE[:2], LENGTHS, 9), {}, "[T-06] src_page_table: shape (2, 100)"),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"row_to_batch": TABLE}, "[T-05] row_to_batch: "),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"out": ints(2, 9)}, "[T-06] out: shape (2, 9)"),
        ("top_k_page_table_transform", (SCORE, TABLE, LENGTHS, 9), {"out_raw_indices": TABLE}, "[T-06] out_raw_"),
        ("top_k_ragged_transform", (SCORE, LENGTHS[:1], LENGTHS, 9), {}, ": offsets: 1 rows"),
        ("top_k_ragged_transform", (SCORE.half(), LENGTHS, LENGTHS, 9), {}, ": input: dtype"),
        ("top_k_ragged_transform", (SCORE, LENGTHS, LENGTHS, 9), {"deterministic": 1}, "[T-12] deterministic: "),
    ],
)  # fmt: skip
def test_what_top_k_cannot_honour_is_named(function, arguments, options, message):
    module = sgl_kernel if hasattr(sgl_kernel, function) else flashinfer
    with pytest.raises(GuardError) as caught:
        getattr(module, function)(*arguments, **options)
    assert str(caught.value).startswith(f"[T-20] {function}{message}" if message[0] == ":" else message)


# ---- logits


def paged(**changes):
    given = {
        "q": torch.zeros(B, N, H, D, dtype=torch.float8_e4m3fn),
        "kv_cache": torch.zeros(5, 64, 1, D + 4, dtype=torch.uint8),
        "weights": torch.zeros(B * N, H),
        "context_lens": ints(B, N),
        "block_table": ints(B, 3),
        "schedule_meta": deep_gemm.get_paged_mqa_logits_metadata(ints(B, N), 64, 132),
        "max_context_len": WIDTH,
    }
    return {**given, **changes}


def test_paged_logits_become_the_ops(served):
    given = paged()
    logits = deep_gemm_legacy.fp8_paged_mqa_logits(**given)
    found = block(served)
    assert (logits.shape, logits.dtype, logits.stride()) == ((B * N, WIDTH), F32, (256, 1))
    assert (found["scores"], found["score_stride"], found["lens"]) == (
        logits.data_ptr(), 256, given["context_lens"].data_ptr()
    )  # fmt: skip
    assert (found["fills"], found["per_token"], found["unscored"], found["width"]) == (0, 1, 0, WIDTH)
    deep_gemm_legacy.fp8_paged_mqa_logits(**given, clean_logits=True)
    assert block(served)["fills"] == 1
    pair = paged(q=(given["q"], None), max_context_len=300)
    assert deep_gemm.fp8_fp4_paged_mqa_logits(**pair).stride() == (512, 1)
    INDEXERS.use(make(scores="bf16")[1])
    half = deep_gemm_legacy.fp8_fp4_paged_mqa_logits(**pair, logits_dtype=torch.bfloat16)
    assert (half.dtype, half.stride()) == (torch.bfloat16, (512, 1))
    assert deep_gemm_legacy.fp8_fp4_paged_mqa_logits(**paged(q=(given["q"], None))).dtype == F32


def test_metadata_has_its_shape_and_holds_nothing():
    for module in (deep_gemm, deep_gemm_legacy):
        meta = module.get_paged_mqa_logits_metadata(ints(B, N), 64, module.get_num_sms())
        assert (meta.shape, meta.dtype, meta.is_contiguous()) == ((133, 2), torch.int32, True)
    INDEXERS.forget()
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="get_num_sms: no CUDA device"):
            deep_gemm.get_num_sms()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(B, N, H, D)}, "[T-04] q: dtype float32"),
        ({"q": torch.zeros(B, H, D)}, ": q: 3 dims"),
        ({"q": torch.zeros(B, N, H + 8, D)}, "[T-20] q: on cpu: expected a CUDA device"),
        (
            {"kv_cache": ints(5, 64, 1, D + 4)},
            ": kv_cache: 272 B a token beside a q of 64 dims",
        ),
        ({"kv_cache": torch.zeros(5, 64, 1, D + 4, dtype=torch.uint8)[:0]}, "[IL-08] kv_cache: 0 pages"),
        ({"weights": torch.zeros(B * N, H).bfloat16()}, "[T-04] weights: dtype bfloat16"),
        ({"context_lens": ints(B)}, ": context_lens: 1 dims"),
        ({"context_lens": ints(B, 1)}, "[T-06] context_lens: shape (3, 1)"),
        ({"block_table": None}, ": block_table: expected a torch.Tensor"),
        ({"schedule_meta": None}, ": schedule_meta: expected a torch.Tensor"),
        ({"schedule_meta": ints(133, 3)}, ": schedule_meta: torch.int32 (133, 3)"),
        ({"q": NESTED}, ": q: a tensor of layout nested"),
        ({"max_context_len": -1}, ": max_context_len: -1"),
        *(
            ({"max_context_len": most}, f"[IL-06] max_context_len: {most} is outside 0..2147483583")
            for most in (2147483584, 1 << 63, 10**30)
        ),
        ({"max_context_len": 1.5}, "[T-12] max_context_len: expected a whole number"),
        ({"clean_logits": 1}, "[T-12] clean_logits: expected True or False"),
        ({"indices": ints(B)}, ": indices: rows that share a request are not built"),
    ],
)
def test_what_logits_cannot_honour_is_named(changes, message):
    with pytest.raises(GuardError) as caught:
        deep_gemm_legacy.fp8_paged_mqa_logits(**paged(**changes))
    assert str(caught.value).startswith(f"[T-20] fp8_paged_mqa_logits{message}" if message[0] == ":" else message)


def test_pairs_and_dtypes_are_refused_by_name():
    function = deep_gemm_legacy.fp8_fp4_paged_mqa_logits
    q = paged()["q"]
    for bad, text in ((q, "expected a pair of codes and scales"), ((None, None), "expected a torch.Tensor")):
        with pytest.raises(GuardError, match=rf"^\[T-20\] fp8_fp4_paged_mqa_logits: q: {text}"):
            function(**paged(q=bad))
    with pytest.raises(GuardError, match=r"^\[T-20\] fp8_fp4_paged_mqa_logits: logits_dtype: torch.float16"):
        function(**paged(q=(q, None)), logits_dtype=torch.float16)


def test_formats_follow_from_the_codes_and_scales_of_q():
    found = {}
    for keys in ("mxfp8", "mxfp4"):
        _, kernels = make(index={"heads": H, "dim": D, "keys": keys})
        INDEXERS.use(kernels)
        found[keys] = kernels
    scales = ints(B, N, H)
    mx8 = paged(q=(paged()["q"], scales))
    mx4 = paged(q=(torch.zeros(B, N, H, D // 2, dtype=torch.uint8), scales),
                kv_cache=torch.zeros(5, 64, 1, D // 2 + 4, dtype=torch.uint8))  # fmt: skip
    for keys, given in (("mxfp8", mx8), ("mxfp4", mx4)):
        deep_gemm.fp8_fp4_paged_mqa_logits(**given)
        assert block((found[keys]._driver, found[keys]))["q_scales"] == scales.data_ptr()
    with pytest.raises(GuardError, match=r"^\[T-06\] q: shape \(3, 2, 8\)"):
        deep_gemm.fp8_fp4_paged_mqa_logits(**{**mx4, "q": (mx4["q"][0], ints(B, N, 8))})


def ragged(**changes):
    given = {
        "q": torch.zeros(ROWS, H, D, dtype=torch.float8_e4m3fn),
        "kv": (torch.zeros(WIDTH, D, dtype=torch.float8_e4m3fn), torch.zeros(WIDTH)),
        "weights": torch.zeros(ROWS, H),
        "cu_seq_len_k_start": ints(ROWS),
        "cu_seq_len_k_end": ints(ROWS),
    }
    return {**given, **changes}


def test_ragged_logits_become_the_ops(served):
    given = ragged()
    logits = deep_gemm_legacy.fp8_mqa_logits(**given)
    found = block(served)
    assert (logits.shape, logits.dtype, logits.stride()) == ((ROWS, WIDTH), F32, (256, 1))
    assert (found["scores"], found["starts"], found["fills"], found["compressed"]) == (
        logits.data_ptr(), given["cu_seq_len_k_start"].data_ptr(), 1, 0
    )  # fmt: skip
    assert deep_gemm_legacy.fp8_mqa_logits(**given, max_seqlen_k=300, clean_logits=False).stride() == (512, 1)
    assert (block(served)["fills"], block(served)["compressed"]) == (0, 1)
    meta = deep_gemm.get_mqa_logits_metadata(given["cu_seq_len_k_start"], given["cu_seq_len_k_end"], WIDTH, H)
    assert (meta.shape, meta.dtype) == ((133, 2), torch.int32)
    pair = ragged(q=(given["q"], None))
    assert deep_gemm.fp8_fp4_mqa_logits(**pair, max_seqlen_k=40, schedule_meta=meta).shape == (ROWS, 40)
    assert deep_gemm_legacy.fp8_fp4_mqa_logits(**pair).shape == (ROWS, WIDTH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(ROWS, D)}, ": q: 2 dims"),
        ({"q": torch.zeros(ROWS, H, D)}, "[T-04] q: dtype float32"),
        ({"kv": ints(4)}, ": kv: expected a pair of codes and scales"),
        ({"kv": (ragged()["kv"][0], None)}, ": kv: expected a pair (keys, scales)"),
        ({"kv": (ragged()["kv"][0], ints(WIDTH))}, "[T-04] kv: dtype int32"),
        ({"kv": (ragged()["kv"][0][:, :32], torch.zeros(WIDTH))}, "[T-06] kv: shape"),
        ({"weights": torch.zeros(ROWS, H).half()}, "[T-04] weights: dtype float16"),
        ({"cu_seq_len_k_start": ints(ROWS).long()}, "[T-04] cu_seq_len_k_start: dtype int64"),
        ({"cu_seq_len_k_end": ints(2)}, "[T-06] cu_seq_len_k_end: shape (2,)"),
        ({"max_seqlen_k": -1}, ": max_seqlen_k: -1"),
        ({"max_seqlen_k": 1 << 63}, "[IL-06] max_seqlen_k: 9223372036854775808 is outside 0..2147483583"),
        ({"clean_logits": None}, "[T-12] clean_logits: expected True or False"),
    ],
)
def test_what_ragged_logits_cannot_honour_is_named(changes, message):
    with pytest.raises(GuardError) as caught:
        deep_gemm_legacy.fp8_mqa_logits(**ragged(**changes))
    assert str(caught.value).startswith(f"[T-20] fp8_mqa_logits{message}" if message[0] == ":" else message)
    with pytest.raises(GuardError, match=r"^\[T-20\] fp8_fp4_mqa_logits: max_seqlen_k: 0"):
        deep_gemm.fp8_fp4_mqa_logits(**ragged(q=(ragged()["q"], None)), max_seqlen_k=0)


def test_what_is_not_built_says_so():
    for name in deep_gemm.__all__:
        if "sparse" in name:
            with pytest.raises(GuardError, match=rf"^\[T-20\] {name}: op: not built"):
                getattr(deep_gemm, name)(1, 2, x=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": ints(B).view(B)}, "context_lens: 1 dims"),
        ({"context_lens": ints(B, N).long()}, "context_lens: torch.int64"),
        ({"block_kv": 0}, "block_kv: 0"),
        ({"num_sms": 0}, "num_sms: 0"),
        ({"num_sms": 1 << 63}, "num_sms: 9223372036854775808: expected 1..2147483647"),
        ({"context_lens": ints(B, N).to_sparse_csr()}, "context_lens: a tensor of layout sparse_csr"),
        ({"indices": ints(B)}, "indices: rows that share"),
    ],
)
def test_metadata_of_what_cannot_be_is_refused(changes, message):
    given = {"context_lens": ints(B, N), "block_kv": 64, "num_sms": 132}
    with pytest.raises(GuardError) as caught:
        deep_gemm.get_paged_mqa_logits_metadata(**{**given, **changes})
    assert str(caught.value).startswith(f"[T-20] get_paged_mqa_logits_metadata: {message}")


def test_metadata_of_windows_that_are_no_int32_is_refused():
    for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"):
        given = {"cu_seq_len_k_start": ints(4), "cu_seq_len_k_end": ints(4), "num_kv_tokens": 4, "num_heads": 64}
        with pytest.raises(
            GuardError, match=rf"^\[T-20\] get_mqa_logits_metadata: {name}: dtype int64, expected int32"
        ):
            deep_gemm.get_mqa_logits_metadata(**{**given, name: ints(4).long()})


# ---- whose kernels


def test_calls_are_served_by_what_was_given_or_loaded(monkeypatch):
    SELECTIONS.forget()
    INDEXERS.forget()
    loaded = []
    monkeypatch.setattr(deployments, "load", lambda spec, device: loaded.append(spec) or make()[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    for k in (9, 5000):
        SELECTIONS.kernels_for(deployments.SelectionNeed("fp32", k), cuda)
    SELECTIONS.kernels_for(deployments.SelectionNeed("bf16", 9), cuda)
    INDEXERS.kernels_for(deployments.LogitsNeed(64, 128, "fp8", "fp32"), cuda)
    assert [(spec.ops, spec.scores) for spec in loaded] == [
        (("topk",), "fp32"), (("topk",), "bf16"), (("indexer_logits",), "fp32")
    ]  # fmt: skip
    assert (loaded[2].index.heads, loaded[2].index.dim, loaded[0].topk) == (64, 128, 1 << 20)
    for module, op in ((sgl_kernel, "topk"), (flashinfer, "topk"), (deep_gemm, "indexer_logits")):
        with pytest.raises(GuardError, match=rf"^\[T-20\] use: kernels: expected loaded kernels with {op}"):
            module.use(None)
