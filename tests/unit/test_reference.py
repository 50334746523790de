"""The fp64 reference and the test writers against golden data, and against plain scalar arithmetic."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dsagen.check.cache import ScaleRule, allocate_cache, natural_rule, quantise_rows, write_tokens
from dsagen.check.compare import Gates, compare_decode
from dsagen.families.sparse_decode import reference
from dsagen.families.sparse_decode.reference import (
    CacheBytes,
    Source,
    combine_reference,
    read_tokens,
    sparse_decode_reference,
)
from dsagen.kv_format import KV_FORMATS, kv_format

VECTORS = Path(__file__).parents[1] / "vectors"

GOLDEN_CACHES = {
    "V32_fm": ("v32", ScaleRule.POW2),
    "V32_fi_glm": ("v32", None),
    "V32_sgl": ("v32", None),
    "V32_NO_ROPE_fm": ("v32_nope", ScaleRule.POW2),
    "V4_fm": ("v4", ScaleRule.POW2),
    "V4_vllm": ("v4", None),
    "V4_fi": ("v4", None),
    "V41_fm": ("v41_page_split", ScaleRule.POW2),
    "V41_interleaved_fm": ("v41_interleaved", ScaleRule.POW2),
    "V41_FP4_fm": ("v41_fp4_page_split", ScaleRule.POW2),
    "V41_FP4_interleaved_fm": ("v41_fp4_interleaved", ScaleRule.POW2),
}


def load(name):
    with np.load(VECTORS / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def bf16(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def pool_as_cache(record, pool, page_size):
    tensor = record.cache_tensor()
    pool = torch.from_numpy(pool)
    row = tensor.logical_stride_bytes
    return pool.as_strided((pool.shape[0], int(page_size), 1, row), (pool.stride(0), row, row, 1))


@pytest.mark.parametrize("name", GOLDEN_CACHES)
def test_dequantised_rows_agree_with_golden_caches(name):
    record, data = kv_format(GOLDEN_CACHES[name][0]), load(f"cache_{name}")
    cache = pool_as_cache(record, data["pool"], data["page_size"])
    rows = read_tokens(record, cache, torch.arange(cache.shape[0] * cache.shape[1]))
    golden = bf16(data["dequant_bf16"]).reshape(rows.shape)
    # bf16 of the exact product: the readers round fp32(code * scale), which an exact product may meet half-way.
    assert torch.equal(rows.isnan(), golden.isnan())
    torch.testing.assert_close(rows.nan_to_num(), golden.double().nan_to_num(), rtol=2.0**-8, atol=0)
    exact = record.scale_kind.value != "fp32" or name.endswith("_fm")
    if exact:
        assert torch.equal(rows.nan_to_num(), golden.double().nan_to_num())


@pytest.mark.parametrize("name", [name for name, (_, rule) in GOLDEN_CACHES.items() if rule])
def test_writer_reproduces_golden_bytes(name):
    format_id, rule = GOLDEN_CACHES[name]
    record, data = kv_format(format_id), load(f"cache_{name}")
    page_size = int(data["page_size"])
    x = bf16(data["x_bf16"]).flatten(0, 1)
    finite = ~x.isnan().any(1)
    ids = torch.arange(x.shape[0])[finite]
    extra = int(data["page_stride_bytes"]) - record.default_page_stride_bytes(page_size)
    caches = allocate_cache(record, len(data["pool"]), page_size, "cpu", max(0, extra))
    write_tokens(record, caches, ids, quantise_rows(record, x[finite], rule))
    golden = {"k_cache": pool_as_cache(record, data["pool"], page_size)}
    for segment in record.segments:
        ours, theirs = (words_of(segment, tensors, ids) for tensors in (caches, golden))
        assert torch.equal(ours, theirs), segment.name


def words_of(segment, caches, ids):
    words, where = CacheBytes.of(caches[segment.tensor]).words(segment, ids)
    return words[where].view(torch.uint8)


@pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_written_tokens_read_back_by_the_byte_map(record, page_size):
    generator = torch.Generator().manual_seed(page_size)
    caches = allocate_cache(record, 5, page_size, "cpu", extra_bytes=48)
    ids = torch.randperm(5 * page_size, generator=generator)[: max(1, 2 * page_size)]
    x = torch.randn(ids.numel(), record.d_qk, generator=generator).bfloat16()
    write_tokens(record, caches, ids, quantise_rows(record, x, natural_rule(record)))
    rows = read_tokens(record, caches, ids)
    # Half a step of the widest binade of a group: of 224 in e4m3 (scale rounded up), of 6 in e2m1 (scale rounded).
    step = 0.2 if "fp4" in record.format_id else 0.075
    assert ((rows - x.double()).abs() <= step * x.abs().double().amax(1, keepdim=True)).all()
    images = {name: storage_bytes(cache) for name, cache in caches.items()}
    for token in range(min(3, ids.numel())):
        for dim in (0, 1, 127, 128, 447, 448, 511, record.d_qk - 1):
            assert rows[token, dim].item() == scalar_value(record, caches, images, int(ids[token]), dim)
    untouched = torch.tensor([i for i in range(5 * page_size) if i not in set(ids.tolist())])
    if untouched.numel():
        # Poison of odd pages is finite where bf16 or fp32 hold it, and then it is huge.
        poison = read_tokens(record, caches, untouched)
        even_page = untouched // page_size % 2 == 0
        if "fp4" not in record.format_id:
            assert poison[even_page].isnan().all()


def storage_bytes(cache):
    whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    return whole.numpy().tobytes()


def scalar_value(record, caches, images, token, dim):
    """One dim read with the record's own Python arithmetic, which shares no code with the reference."""
    strides = {name: cache.view(torch.uint8).stride(0) for name, cache in caches.items()}
    page_size = next(iter(caches.values())).shape[1]
    page, slot = divmod(token, page_size)

    def element(tensor, byte, element_type, shift=0):
        data = images[tensor][byte : byte + max(1, element_type.bits // 8)]
        return element_type.decode(int.from_bytes(data, "little") >> shift & ((1 << element_type.bits) - 1))

    at = record.dim_address(page, slot, dim, page_size, strides[next(iter(strides))] if len(strides) == 1 else 0)
    if len(strides) > 1:
        tensor = next(s for s in record.data_segments if s.first_dim <= dim < s.first_dim + s.count).tensor
        at = record.dim_address(page, slot, dim, page_size, strides[tensor])
    value = element(at.tensor, at.byte, at.element, at.shift_bits)
    group = record.scale_group(dim)
    if group is None:
        return value
    segment = record.segment("scales")
    return value * element(
        segment.tensor, record.scale_byte(page, slot, group, page_size, strides[segment.tensor]), segment.element
    )


EXTRA_FORMATS = {
    "v4": "v4",
    "v41_page_split": "v41_fp4_page_split",
    "v41_interleaved": "v41_fp4_interleaved",
}


def golden_decode(name, format_id, **options):
    data, record = load(name), kv_format(format_id)
    cache = pool_as_cache(record, data["pool"], data["page_size"])
    q, indices = bf16(data["q_bf16"]), torch.from_numpy(data["indices"])
    if q.ndim == 3:
        q, indices = q.unsqueeze(1), indices.unsqueeze(1)
    for key in ("attn_sink", "topk_length"):
        if key in data:
            options.setdefault(key, torch.from_numpy(data[key]))
    if "extra_pool" in data:
        other = kv_format(EXTRA_FORMATS[format_id])
        lengths = torch.from_numpy(data["extra_topk_length"]) if "extra_topk_length" in data else None
        pool = pool_as_cache(other, data["extra_pool"], data["extra_page_size"])
        options["extra"] = Source(other, pool, torch.from_numpy(data["extra_indices"]), lengths)
    result = sparse_decode_reference(q, record, cache, indices, sm_scale=float(data["sm_scale"]), **options)
    return data, result


@pytest.mark.parametrize(
    ("name", "format_id"),
    [
        ("decode_v32_p2", "v32"),
        ("decode_v32_arbitrary_scales", "v32"),
        ("decode_norope_allinvalid", "v32_nope"),
        ("decode_v4_extra", "v4"),
        ("decode_v41_blocksplit_fp4", "v41_page_split"),
        ("decode_v41_interleaved_fp4", "v41_interleaved"),
    ],
)
def test_reference_agrees_with_golden_decode(name, format_id):
    data, result = golden_decode(name, format_id)
    want_out = torch.from_numpy(data["out_f32"]).flatten(0, 1)
    want_lse = torch.from_numpy(data["lse_f64"]).transpose(1, 2).flatten(0, 1)
    assert torch.equal(result.lse.isinf(), want_lse.isinf())
    exact = name != "decode_v32_arbitrary_scales"
    # Golden rows are rounded to bf16, which is exact for power-of-two scales only.
    tolerance = 2e-7 if exact else 2.0**-8
    torch.testing.assert_close(result.out, want_out.double(), rtol=tolerance, atol=tolerance / 10)
    torch.testing.assert_close(result.lse, want_lse, rtol=1e-12 if exact else 1e-4, atol=1e-12 if exact else 1e-6)
    assert compare_decode(result.out, result.lse, want_out.double(), want_lse, 128, Gates()).passed


def test_reference_agrees_with_base_two_conventions():
    data = load("decode_fi_lse2")
    lengths = torch.from_numpy(data["topk_length_per_token"]).unsqueeze(1)
    sink = torch.from_numpy(data["attn_sink"])
    for with_sink in (False, True):
        options = {"attn_sink": sink if with_sink else None, "topk_length": lengths}
        _, result = golden_decode("decode_fi_lse2", "v32", lse_base=2, empty_lse=-math.inf, **options)
        lse = result.lse
        if with_sink:
            lse = torch.logaddexp2(lse, sink.double() / math.log(2))
        want = torch.from_numpy(data["lse_base2_with_sink_f64" if with_sink else "lse_base2_nosink_f64"])
        torch.testing.assert_close(lse, want, rtol=1e-4, atol=1e-5)
        golden = torch.from_numpy(data["out_sink_f32" if with_sink else "out_nosink_f32"]).double()
        torch.testing.assert_close(result.out, golden, rtol=2.0**-8, atol=2e-4)


@pytest.mark.parametrize("sink", [False, True])
def test_combine_agrees_with_golden(sink):
    data = load("combine")
    cumulative = data["num_splits"]
    kind = "sink" if sink else "nosink"
    checked = 0
    for request in range(len(cumulative) - 1):
        first, last = int(cumulative[request]), int(cumulative[request + 1])
        if last - first < 2:
            continue
        lse_accum = torch.from_numpy(data["lse_accum_f32"][first:last, 0]).unsqueeze(0)
        o_accum = bf16(data["o_accum_bf16"][first:last, 0]).unsqueeze(0)
        out, lse = combine_reference(
            lse_accum, o_accum, attn_sink=torch.from_numpy(data["attn_sink"]) if sink else None
        )
        torch.testing.assert_close(
            lse[0], torch.from_numpy(data[f"lse_{kind}_f32"][request, 0]).double(), rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(out[0], bf16(data[f"out_{kind}_bf16"][request, 0]).double(), rtol=2.0**-8, atol=1e-6)
        checked += 1
    assert checked


def test_nan_of_a_selected_token_arrives_and_of_others_does_not():
    record = kv_format("v32")
    caches = allocate_cache(record, 4, 5, "cpu")
    ids = torch.arange(10)
    write_tokens(record, caches, ids, quantise_rows(record, torch.randn(10, 576).bfloat16(), ScaleRule.RAW))
    q = torch.randn(2, 1, 3, 576).bfloat16()
    indices = torch.tensor([[[1, -1, 2, 20, 3]], [[4, 12, 5, 6, 7]]], dtype=torch.int32)
    result = sparse_decode_reference(q, record, caches["k_cache"], indices, sm_scale=0.1)
    assert not result.out[0].isnan().any() and not result.lse[0].isnan().any()
    assert result.out[1].isnan().all() and result.lse[1].isnan().all()


def test_split_and_merged_equals_whole():
    record = kv_format("bf16")
    generator = torch.Generator().manual_seed(5)
    caches = allocate_cache(record, 7, 3, "cpu")
    ids = torch.arange(21)
    write_tokens(
        record, caches, ids, quantise_rows(record, torch.randn(21, 576, generator=generator).bfloat16(), ScaleRule.RAW)
    )
    q = torch.randn(2, 1, 3, 576, generator=generator).bfloat16()
    indices = torch.randint(-3, 21, (2, 1, 17), generator=generator, dtype=torch.int32)
    indices[0, 0, 8:12] = -1
    sink = torch.tensor([0.5, math.inf, -math.inf])
    whole = sparse_decode_reference(q, record, caches, indices, sm_scale=0.1, attn_sink=sink)
    parts = [
        sparse_decode_reference(q, record, caches, part, sm_scale=0.1, lse_base=2, empty_lse=-math.inf)
        for part in (indices[..., :8], indices[..., 8:12], indices[..., 12:])
    ]
    out, lse = combine_reference(
        torch.stack([p.lse for p in parts], 1), torch.stack([p.out for p in parts], 1), attn_sink=sink
    )
    torch.testing.assert_close(out, whole.out, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, whole.lse, rtol=1e-12, atol=1e-12)


def test_chosen_rows_equal_those_of_the_whole():
    record = kv_format("v32")
    caches = allocate_cache(record, 3, 4, "cpu")
    write_tokens(
        record, caches, torch.arange(12), quantise_rows(record, torch.randn(12, 576).bfloat16(), ScaleRule.POW2)
    )
    q = torch.randn(3, 2, 2, 576).bfloat16()
    indices = torch.randint(-2, 12, (3, 2, 9), dtype=torch.int32)
    lengths = torch.tensor([[9, 2], [0, 5], [12, -1]], dtype=torch.int32)
    whole = sparse_decode_reference(q, record, caches, indices, sm_scale=0.05, topk_length=lengths)
    rows = torch.tensor([5, 0, 3])
    some = sparse_decode_reference(q, record, caches, indices, sm_scale=0.05, topk_length=lengths, rows=rows)
    assert torch.equal(some.out, whole.out[rows]) and torch.equal(some.lse, whole.lse[rows])
    # A length past the row is the row's, one below 0 is none.
    assert whole.lse[5].isposinf().all() and (whole.out[5] == 0).all() and whole.lse[4].isfinite().all()


def test_chunks_do_not_matter(monkeypatch):
    record = kv_format("v32")
    caches = allocate_cache(record, 3, 4, "cpu")
    write_tokens(
        record, caches, torch.arange(12), quantise_rows(record, torch.randn(12, 576).bfloat16(), ScaleRule.POW2)
    )
    q = torch.randn(3, 2, 2, 576).bfloat16()
    indices = torch.randint(-2, 12, (3, 2, 9), dtype=torch.int32)
    whole = sparse_decode_reference(q, record, caches, indices, sm_scale=0.05)
    monkeypatch.setattr(reference, "CHUNK_BYTES_CPU", 1)
    single = sparse_decode_reference(q, record, caches, indices, sm_scale=0.05)
    torch.testing.assert_close(single.out, whole.out, rtol=1e-12, atol=1e-14)
    assert single.peak == pytest.approx(whole.peak)
