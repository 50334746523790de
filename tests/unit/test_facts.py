import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagen.arch import ARCHS, Arch, arch, arch_for_capability
from dsagen.dtype import BF16, E2M1, E4M3, ELEMENT_TYPES, FP16, FP32, UE4M3, UE8M0, NanRule, element_type
from dsagen.errors import SpecError
from dsagen.kv_format import (
    CACHE_ALIGNMENT_BYTES,
    KV_FAMILIES,
    KV_FORMATS,
    Layout,
    ScaleKind,
    extra_cache_problem,
    kv_format,
    resolve_kv_format,
)
from dsagen.model import CUSTOM, MODELS, model_preset

VECTORS = Path(__file__).parents[1] / "vectors"
ALL_FORMATS = pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
ALL_ARCHS = pytest.mark.parametrize("row", ARCHS.values(), ids=ARCHS)


# --- element types ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "code", "value"),
    [
        (E4M3, 0x38, 1.0), (E4M3, 0x7E, 448.0), (E4M3, 0x01, 2.0**-9), (E4M3, 0xFE, -448.0), (E4M3, 0x08, 2.0**-6),
        (E2M1, 0x7, 6.0), (E2M1, 0x1, 0.5), (E2M1, 0xF, -6.0), (E2M1, 0x5, 3.0),
        (UE8M0, 127, 1.0), (UE8M0, 0, 2.0**-127), (UE8M0, 254, 2.0**127), (UE8M0, 114, 2.0**-13),
        (UE4M3, 0x38, 1.0), (UE4M3, 0x01, 2.0**-9), (UE4M3, 0x7E, 448.0),
        (BF16, 0x3F80, 1.0), (BF16, 0x0001, 2.0**-133), (BF16, 0xFF80, -math.inf),
        (FP16, 0x7BFF, 65504.0), (FP32, 0x3F800000, 1.0),
    ],
)  # fmt: skip
def test_known_codes(element, code, value):
    assert element.decode(code) == value


@pytest.mark.parametrize("element", [E4M3, UE4M3, UE8M0, BF16, FP16])
def test_nan_codes(element):
    top = (1 << element.bits) - 1
    assert math.isnan(element.decode(top))


def test_e4m3_has_two_nans_and_no_infinity():
    values = [E4M3.decode(code) for code in range(256)]
    assert [code for code, value in enumerate(values) if math.isnan(value)] == [0x7F, 0xFF]
    assert not any(math.isinf(value) for value in values)
    assert math.copysign(1, E4M3.decode(0x80)) == -1


def test_ue4m3_is_e4m3_without_sign():
    for code in range(128):
        assert UE4M3.decode(code) == E4M3.decode(code) or (math.isnan(UE4M3.decode(code)) and code == 127)
    assert all(math.isnan(UE4M3.decode(code)) for code in range(128, 256))


def test_every_half_agrees_with_numpy():
    expected = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    found = np.array([FP16.decode(code) for code in range(1 << 16)])
    np.testing.assert_array_equal(found, expected)


@given(st.integers(0, 2**32 - 1))
def test_fp32_agrees_with_struct(code):
    (expected,) = struct.unpack("<f", struct.pack("<I", code))
    found = FP32.decode(code)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_e4m3_decoder_inverts_golden_codes():
    data = np.load(VECTORS / "codec.npz")
    table = np.array([E4M3.decode(code) for code in range(256)])
    finite = np.sort(np.unique(table[np.isfinite(table)]))
    for value, code in zip(data["e4m3_in_f32"].astype(np.float64), data["e4m3_code"], strict=True):
        if math.isnan(value):
            assert math.isnan(table[code])
            continue
        clamped = min(max(value, -448.0), 448.0)
        assert abs(table[code] - clamped) == np.min(np.abs(finite - clamped))


def test_e2m1_decoder_inverts_golden_codes():
    data = np.load(VECTORS / "codec.npz")
    table = np.array([E2M1.decode(code) for code in range(16)])
    for value, code in zip(data["e2m1_in_f32"].astype(np.float64), data["e2m1_even_keep"], strict=True):
        if math.isfinite(value):
            clamped = min(max(value, -6.0), 6.0)
            assert abs(table[code] - clamped) == np.min(np.abs(table - clamped))


def test_golden_power_of_two_bytes_decode_to_the_power_above():
    data = np.load(VECTORS / "codec.npz")
    for value, byte in zip(data["pow2_in_f32"].astype(np.float64), data["pow2_ceil_byte"], strict=True):
        power = UE8M0.decode(int(byte))
        assert power / 2 < value <= power


def test_encoding_gives_golden_codes():
    data = np.load(VECTORS / "codec.npz")
    for value, code in zip(data["e4m3_in_f32"].tolist(), data["e4m3_code"].tolist(), strict=True):
        told = 0x7F if math.isnan(value) else 0xFF  # the sign of NaN is free
        assert E4M3.encode(value) & told == code & told
    for value, code in zip(data["e2m1_in_f32"].tolist(), data["e2m1_even_keep"].tolist(), strict=True):
        assert math.isnan(value) or E2M1.encode(value) == code


@pytest.mark.parametrize("element", [E4M3, E2M1, UE4M3, UE8M0])
def test_encoding_inverts_decoding(element):
    for code in range(1 << element.bits):
        value = element.decode(code)
        assert math.isnan(value) or element.encode(value) == code
    assert element.encode(math.inf) == element.encode(element.largest)


def test_what_has_no_code_is_refused():
    for element, value in ((E2M1, math.nan), (UE4M3, -1.0), (BF16, 1.0)):
        with pytest.raises(ValueError, match=r"has no code for NaN|has no sign|encoding searches types"):
            element.encode(value)


@pytest.mark.parametrize("element", ELEMENT_TYPES.values(), ids=ELEMENT_TYPES)
def test_codes_outside_the_type_are_refused(element):
    for code in (-1, 1 << element.bits):
        with pytest.raises(ValueError, match="is no code of"):
            element.decode(code)


def test_packed_sizes():
    assert E2M1.bytes_for(512) == 256
    assert BF16.bytes_for(64) == 128
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        E2M1.bytes_for(3)
    with pytest.raises(ValueError, match="no whole number"):
        _ = E2M1.bytes_per_element
    with pytest.raises(ValueError, match="cannot hold"):
        dataclasses.replace(E4M3, mantissa_bits=4)
    assert element_type("e4m3") is E4M3
    assert E2M1.nan_rule is NanRule.NONE
    with pytest.raises(SpecError, match="unknown element type 'fp8'"):
        element_type("fp8")


# --- architectures ---------------------------------------------------------------------------------------------------


def test_the_rows_and_their_shared_memory():
    optin = {name: row.smem_optin_bytes for name, row in ARCHS.items()}
    assert optin == {
        "sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448,
        "sm_110a": 232448, "sm_120a": 101376, "sm_121a": 101376,
    }  # fmt: skip


@ALL_ARCHS
def test_row_is_consistent(row: Arch):
    assert row.smem_optin_bytes + 1024 == row.smem_per_sm_bytes
    assert row.name == f"sm_{row.compute_capability[0]}{row.compute_capability[1]}{row.suffix}"
    assert row.min_cuda >= (12, 8)
    assert row.max_warps_per_sm in (48, 64)
    assert row.has_e4m3_cvt == (row.compute_capability >= (8, 9))
    assert row.has_pdl == row.has_bulk_copy == (row.compute_capability[0] >= 9)
    assert arch_for_capability(*row.compute_capability) is row
    assert row.virtual == row.name.replace("sm_", "compute_")
    assert row.ptx_define == 100 * row.compute_capability[0] + 10 * row.compute_capability[1]


@ALL_ARCHS
def test_spellings(row: Arch):
    major, minor = row.compute_capability
    for text in (
        row.name,
        row.name.upper(),
        row.name.replace("_", ""),
        f"{major}{minor}{row.suffix}",
        f" {major}.{minor}{row.suffix} ",
    ):
        assert arch(text) is row


@ALL_ARCHS
def test_a_missing_suffix_names_the_target(row: Arch):
    if row.suffix:
        for text in (row.name.removesuffix("a"), f"{row.compute_capability[0]}.{row.compute_capability[1]}"):
            with pytest.raises(SpecError, match=f"write {row.name}$"):
                arch(text)
        with pytest.raises(SpecError, match=f"family targets are not built, write {row.name}"):
            arch(row.name.removesuffix("a") + "f")


@pytest.mark.parametrize("text", ["", "sm_75", "sm_7x", "hopper", "90aa", "sm_90a; rm", "-1", "9", None, 90, "sm_٩٠a"])
def test_unknown_archs_are_refused_with_the_list(text):
    with pytest.raises(SpecError, match="sm_90a"):
        arch(text)


def test_typo_names_the_nearest_row():
    with pytest.raises(SpecError, match=r"did you mean sm_100a\?"):
        arch("sm_1000a")
    with pytest.raises(SpecError, match=r"did you mean sm_90a\?"):
        arch("sm_90b")
    with pytest.raises(SpecError, match=r"no arch for compute capability 7\.5"):
        arch_for_capability(7, 5)


def test_figures_are_only_those_measured():
    assert {row.name: [f.device for f in row.figures] for row in ARCHS.values() if row.figures} == {
        "sm_90a": ["NVIDIA H200"]
    }


# --- KV formats ------------------------------------------------------------------------------------------------------

GOLDEN = {
    "V32_fm": "v32", "V32_fi_glm": "v32", "V32_sgl": "v32", "V32_NO_ROPE_fm": "v32_nope",
    "V4_fm": "v4", "V4_vllm": "v4", "V4_fi": "v4",
    "V41_fm": "v41_page_split", "V41_interleaved_fm": "v41_interleaved",
    "V41_FP4_fm": "v41_fp4_page_split", "V41_FP4_interleaved_fm": "v41_fp4_interleaved",
}  # fmt: skip


def read_code(pool: bytes, address) -> int:
    size = -(-address.element.bits // 8)
    word = int.from_bytes(pool[address.byte : address.byte + size], "little")
    return word >> address.shift_bits & ((1 << address.element.bits) - 1)


def test_every_golden_cache_is_covered():
    assert {path.stem.removeprefix("cache_") for path in VECTORS.glob("cache_*.npz")} == set(GOLDEN)


@pytest.mark.parametrize("vector", GOLDEN)
def test_byte_map_reads_golden_caches(vector):
    """Values read through the record, times the scale read through it, are what the format's own library reads."""
    data, record = np.load(VECTORS / f"cache_{vector}.npz"), kv_format(GOLDEN[vector])
    page_size, stride = int(data["page_size"]), int(data["page_stride_bytes"])
    pool, expected = data["pool"].tobytes(), data["dequant_bf16"]
    pages, tokens, dims = expected.shape
    assert (tokens, dims) == (page_size, record.d_qk)
    assert record.page_stride_problem(page_size, stride) is None
    scale_element = record.segment("scales").element
    checked = 0
    for page, offset in [(p, o) for p in range(pages) for o in range(tokens)]:
        want = (expected[page, offset].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        got = []
        for dim in range(dims):
            address = record.dim_address(page, offset, dim, page_size, stride)
            value, group = address.element.decode(read_code(pool, address)), record.scale_group(dim)
            if group is not None:
                at = record.scale_byte(page, offset, group, page_size, stride)
                size = scale_element.bytes_per_element
                value *= scale_element.decode(int.from_bytes(pool[at : at + size], "little"))
            got.append(value)
        finite = np.isfinite(want)
        # bf16 rounding of the product is the reading library's; a power-of-two scale needs none.
        np.testing.assert_allclose(np.array(got)[finite], want[finite], rtol=2.0**-8, atol=0)
        checked += int(finite.sum())
    assert checked > 5000


@pytest.mark.parametrize(
    ("format_id", "value", "rope", "scale"),
    [
        ("v32", lambda p, o, i: 656 * o + i, lambda p, o, j: 656 * o + 528 + 2 * j,
         lambda p, o, g: 656 * o + 512 + 4 * g),
        ("v32_nope", lambda p, o, i: 528 * o + i, None, lambda p, o, g: 528 * o + 512 + 4 * g),
        ("v4", lambda p, o, i: 576 * o + i, lambda p, o, j: 576 * o + 448 + 2 * j, lambda p, o, g: 576 * p + 8 * o + g),
        ("v41_page_split", lambda p, o, i: 512 * o + i, None, lambda p, o, g: 512 * p + 16 * o + g),
        ("v41_interleaved", lambda p, o, i: 528 * o + i, None, lambda p, o, g: 528 * o + 512 + g),
        ("v41_fp4_page_split", lambda p, o, i: 256 * o + i // 2, None, lambda p, o, g: 256 * p + 32 * o + g),
        ("v41_fp4_interleaved", lambda p, o, i: 288 * o + i // 2, None, lambda p, o, g: 288 * o + 256 + g),
        ("bf16", lambda p, o, i: 1152 * o + 2 * i, None, None),
        ("bf16_d512", lambda p, o, i: 1024 * o + 2 * i, None, None),
    ],
)  # fmt: skip
def test_addresses_agree_with_closed_forms(format_id, value, rope, scale):
    record = kv_format(format_id)
    for page_size in (1, 2, 61, 64):
        stride = record.default_page_stride_bytes(page_size) + 4096
        # Page 5 million lies past 2**32 bytes: nothing may wrap.
        for page in (0, 3, 5_000_000):
            for offset in {0, page_size // 2, page_size - 1}:
                base = page * stride
                for i in range(record.segment("values").count):
                    assert record.value_byte(page, offset, i, page_size, stride) == base + value(page_size, offset, i)
                for j in range(64 if rope else 0):
                    assert record.rope_byte(page, offset, j, page_size, stride) == base + rope(page_size, offset, j)
                for g in range(record.scale_groups):
                    assert record.scale_byte(page, offset, g, page_size, stride) == base + scale(page_size, offset, g)
    if rope is None:
        with pytest.raises(ValueError, match="no segment 'rope'"):
            record.rope_byte(0, 0, 0, 64, 1 << 20)


@ALL_FORMATS
def test_segments_tile_the_record_without_overlap(record):
    page_size = 3
    for tensor in record.tensors:
        owner: dict[int, str] = {}
        for segment in (s for s in record.segments if s.tensor == tensor.name):
            for offset in range(page_size):
                start = segment.byte_address(0, offset, 0, page_size, 0)
                for byte in range(start, start + segment.size_bytes):
                    assert owner.setdefault(byte, segment.name) == segment.name
                    assert byte < record.page_bytes(page_size, tensor.name)
        # V4's eighth scale byte is the only one that no segment names.
        padding = 1 if record.format_id == "v4" else 0
        assert len(owner) == record.page_bytes(page_size, tensor.name) - padding * page_size


@ALL_FORMATS
def test_dims_are_covered_once_and_scaled_as_declared(record):
    covered = [dim for s in record.data_segments for dim in range(s.first_dim, s.first_dim + s.count)]
    assert covered == list(range(record.d_qk))
    assert sum(t.logical_stride_bytes for t in record.tensors) == record.record_bytes
    assert record.record_bytes % 4 == 0
    assert record.d_nope + record.d_rope == record.d_qk
    assert record.d_v == (record.d_qk if record.rope_in_v or not record.d_rope else record.d_nope)
    assert record.has_segment("scales") == (record.scale_kind is not ScaleKind.NONE)
    if record.scale_kind is ScaleKind.NONE:
        assert record.scaled_dims == 0
        assert record.scale_group(0) is None
    else:
        assert record.scaled_dims == record.segment("values").count
        assert record.scale_group(0) == 0
        assert record.scale_group(record.scaled_dims - 1) == record.scale_groups - 1
        if record.scaled_dims < record.d_qk:
            assert record.scale_group(record.scaled_dims) is None
    for dim in (-1, record.d_qk):
        with pytest.raises(ValueError, match="is outside"):
            record.scale_group(dim)


@ALL_FORMATS
def test_rows_are_aligned_for_16_byte_loads(record):
    for segment in record.data_segments:
        assert segment.token_stride_bytes % CACHE_ALIGNMENT_BYTES == 0
        assert segment.offset_bytes % CACHE_ALIGNMENT_BYTES == 0
    for tensor in record.tensors:
        for page_size in (1, 2, 61, 64, 69, 256):
            stride = record.default_page_stride_bytes(page_size, tensor.name)
            assert record.page_stride_problem(page_size, stride, tensor.name) is None


@ALL_FORMATS
def test_layout_is_what_the_strides_say(record):
    split = record.layout is Layout.PAGE_SPLIT
    assert split == any(s.section_bytes_per_token for s in record.segments)
    for tensor in record.tensors:
        assert split == (tensor.logical_stride_bytes != tensor.io_stride_bytes)
        element_bytes = 1 if "uint8" in tensor.dtypes else 2
        assert tensor.columns * element_bytes == tensor.logical_stride_bytes


@ALL_FORMATS
def test_records_are_found_by_what_a_spec_declares(record):
    assert kv_format(record.format_id) is record
    assert resolve_kv_format(record.format_id, record.layout, record.scale_kind, record.d_qk) is record
    assert resolve_kv_format(record.family, record.layout, record.scale_kind, record.d_qk) is record


def test_v4_names_its_two_strides():
    assert (kv_format("v4").logical_stride_bytes, kv_format("v4").io_stride_bytes) == (584, 576)


def test_page_stride_problems_say_what_to_do():
    v4 = kv_format("v4")
    assert "less than the 37376 B of 64 tokens" in v4.page_stride_problem(64, 37375)
    assert "pad pages of 61 tokens to 35712 B" in v4.page_stride_problem(61, 61 * 584)
    assert v4.default_page_stride_bytes(64) == 37440
    assert v4.default_page_stride_bytes(2) == 1728


@pytest.mark.parametrize(("page", "offset", "index"), [(-1, 0, 0), (0, 64, 0), (0, -1, 0), (0, 0, 512), (0, 0, -1)])
def test_addresses_outside_are_refused(page, offset, index):
    with pytest.raises(ValueError, match="outside pages of 64 tokens"):
        kv_format("v32").value_byte(page, offset, index, 64, 41984)


def test_resolving_takes_the_declared_and_defaults_to_interleaved():
    assert resolve_kv_format("v41").format_id == "v41_interleaved"
    assert resolve_kv_format("v41", "page_split").format_id == "v41_page_split"
    assert resolve_kv_format("v32").scale_kind is ScaleKind.FP32
    assert resolve_kv_format("v32", scale="fp32_pow2").format_id == "v32_pow2"
    assert resolve_kv_format("bf16", d_qk=512).format_id == "bf16_d512"
    with pytest.raises(SpecError, match="no layout 'page_split': it has interleaved"):
        resolve_kv_format("v32", "page_split")
    with pytest.raises(SpecError, match=r"did you mean v41_fp4\?"):
        resolve_kv_format("v41_fp8")
    with pytest.raises(SpecError, match=r"did you mean v32\?"):
        kv_format("v33")
    with pytest.raises(SpecError, match="unknown KV format"):
        kv_format(["v32"])


def test_several_tensors_have_no_single_stride():
    record = kv_format("bf16_split")
    with pytest.raises(ValueError, match="name one of its tensors"):
        _ = record.logical_stride_bytes
    assert record.cache_tensor("kpe_cache").columns == 64
    assert record.dim_address(2, 1, 513, 64, 8192).byte == 2 * 8192 + 128 + 2
    assert record.dim_address(2, 1, 513, 64, 8192).tensor == "kpe_cache"


def test_second_caches():
    allowed = {
        (main.format_id, extra.format_id)
        for main in KV_FORMATS.values()
        for extra in KV_FORMATS.values()
        if extra_cache_problem(main, extra) is None
    }
    same = {(name, name) for name in KV_FORMATS}
    mixed = {("v41_interleaved", "v41_fp4_interleaved"), ("v41_page_split", "v41_fp4_page_split")}
    assert allowed == same | mixed
    refusal = extra_cache_problem(kv_format("v41_page_split"), kv_format("v41_fp4_interleaved"))
    assert refusal.endswith("allowed is v41_page_split or v41_fp4_page_split")


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [p for p in MODELS.values() if p.name != CUSTOM], ids=lambda p: p.name)
def test_presets_fit_their_formats(preset):
    main = resolve_kv_format(preset.kv)
    assert (main.d_qk, main.d_v) == (preset.d_qk, preset.d_v)
    assert main.d_rope == preset.d_rope
    assert preset.kv in KV_FAMILIES
    assert preset.topk > 0
    assert (preset.extra_kv is None) == (preset.extra_topk is None)
    if preset.extra_kv:
        assert extra_cache_problem(main, resolve_kv_format(preset.extra_kv, main.layout)) is None


def test_softmax_scale_of_v32():
    assert model_preset("v32").sm_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-15)


def test_unknown_model_names_the_nearest():
    with pytest.raises(SpecError, match=r"did you mean v41\?"):
        model_preset("v4.1")
