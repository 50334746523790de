"""The cache kernels on the CPU: every code under every scale, every rounding boundary, golden bytes, all places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host import COMPILER, HostModelError
from kv_case import Pool, bf16_bits, numbers, read, write

from dsagen.dtype import E2M1, E4M3, FP32, UE4M3, UE8M0, ElementType
from dsagen.kv_format import KV_FORMATS, KvFormat, kv_format
from dsagen.kv_rule import default_rule, rules_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

VECTORS = Path(__file__).parents[1] / "vectors"
ARCHS = ("sm_90a", "sm_80")
# Cache file -> format, and the rule that its writer follows.
GOLDEN = {
    "V32_fm": ("v32", "pow2_scale_floor"),
    "V32_fi_glm": ("v32", "amax_floor"),
    "V32_sgl": ("v32", "normal_floor_reciprocal"),
    "V32_NO_ROPE_fm": ("v32_nope", "pow2_scale_floor"),
    "V4_fm": ("v4", "pow2_scale_floor"),
    "V4_vllm": ("v4", "pow2_amax_floor"),
    "V4_fi": ("v4", "pow2_scale_floor"),
    "V41_fm": ("v41_page_split", "pow2_scale_floor"),
    "V41_interleaved_fm": ("v41_interleaved", "pow2_scale_floor"),
    "V41_FP4_fm": ("v41_fp4_page_split", "e4m3_scale_floor"),
    "V41_FP4_interleaved_fm": ("v41_fp4_interleaved", "e4m3_scale_floor"),
}
# fp32 scales: ordinary, tiny, subnormal, huge, none, not a number.
FP32_SCALES = np.array(
    [1.0, 0.1, 1 / 448, 3.7e-5, 2.0**-126, 1e-39, 1e-45, 7.6e35, 3.4e38, 0.0, np.inf, np.nan, 0.3333, 5e-3, 11.0, 2.0],
    np.float32,
)


def decoded(element: ElementType) -> np.ndarray:
    return np.array([element.decode(code) for code in range(1 << element.bits)])


def golden(name: str) -> tuple[Pool, np.ndarray, np.ndarray]:
    """The pool, x and what its library reads back, the two as uint16 [tokens, d]."""
    record = kv_format(GOLDEN[name][0])
    with np.load(VECTORS / f"cache_{name}.npz") as data:
        pool = Pool(record, int(data["page_size"]), {record.tensors[0].name: data["pool"].copy()})
        return pool, data["x_bf16"].reshape(-1, record.d_qk), data["dequant_bf16"].reshape(-1, record.d_qk)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_caches_are_written(name: str, arch: str) -> None:
    wanted, x, _ = golden(name)
    blank = Pool(wanted.record, wanted.page_size, {n: np.full_like(v, 0xA5) for n, v in wanted.bytes_of.items()})
    found = write(blank, GOLDEN[name][1], "bf16", x, np.arange(len(x), dtype=np.int64), arch)
    finite = [token for token in range(len(x)) if np.isfinite(numbers(x[token])).all()]
    assert len(finite) > 10
    for token in finite:
        for segment in wanted.record.segments:
            ours, theirs = (pool.segment(segment.name, token) for pool in (found, wanted))
            assert np.array_equal(ours, theirs), (token, segment.name)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_caches_are_read(name: str, arch: str) -> None:
    pool, _, wanted = golden(name)
    found = read(pool, np.arange(len(wanted), dtype=np.int32), arch)
    both_nan = np.isnan(numbers(found)) & np.isnan(numbers(wanted))
    assert np.array_equal(np.where(both_nan, 0, found), np.where(both_nan, 0, wanted))


def scale_bytes(record: KvFormat) -> np.ndarray:
    """Stored scales, each as its bytes: all codes there are, for fp32 some of every kind."""
    element = record.segment("scales").element
    if element is FP32:
        return FP32_SCALES.view(np.uint8).reshape(-1, 4)
    return np.arange(256, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format_id", ["v32", "v32_nope", "v4", "v41_interleaved", "v41_page_split",
                                       "v41_fp4_interleaved", "v41_fp4_page_split"])  # fmt: skip
def test_every_code_under_every_scale(format_id: str, arch: str) -> None:
    """A token for each scale and shift: codes count up through a token, so that shifts bring each under each scale."""
    record = kv_format(format_id)
    values, scales = record.segment("values"), record.segment("scales")
    stored = scale_bytes(record)
    codes_of = 1 << values.element.bits
    # A group as long as the code space needs one token for a scale, a shorter one several.
    shifts = range(0, codes_of, min(codes_of, record.scale_group_dims))
    pool = Pool.poisoned(record, -(-len(stored) * len(shifts) // 7), 7)
    seen, expected = set(), []
    table = decoded(values.element)
    known = np.array([UE8M0.decode(c) for c in range(256)]) if scales.element is UE8M0 else decoded(UE4M3)
    scale_values = FP32_SCALES.astype(np.float64) if scales.element is FP32 else known
    for number in range(len(stored) * len(shifts)):
        which, shift = number % len(stored), shifts[number // len(stored)]
        in_group = np.arange(values.count) % record.scale_group_dims
        codes = (in_group + shift) % codes_of
        seen.update((int(code), which) for code in set(codes.tolist()))
        packed = codes if values.element is E4M3 else codes[0::2] | codes[1::2] << 4
        pool.segment("values", number)[...] = packed
        pool.segment("scales", number)[...] = np.tile(stored[which], scales.count)
        if record.has_segment("rope"):
            pool.segment("rope", number)[...] = number % 251
        with np.errstate(invalid="ignore", over="ignore"):
            expected.append(table[codes] * scale_values[which])
    assert len(seen) == codes_of * len(stored)
    found = read(pool, np.arange(len(expected), dtype=np.int32), arch)
    wanted = bf16_bits(np.array(expected))
    nan = np.isnan(numbers(wanted))
    assert np.array_equal(np.isnan(numbers(found[:, : values.count])), nan)
    assert np.array_equal(np.where(nan, 0, found[:, : values.count]), np.where(nan, 0, wanted))
    if record.has_segment("rope"):
        rope = found[:, values.count :]
        assert np.array_equal(rope, np.repeat(np.arange(len(rope)) % 251 * 257, 64).reshape(-1, 64))


def boundaries(element: ElementType) -> np.ndarray:
    """fp32 numbers at, and to both sides of, every code and every midpoint of two, of both signs; and small ones."""
    sizes = np.unique(decoded(element)[np.isfinite(decoded(element))].clip(0)).astype(np.float32)
    points = np.concatenate([sizes, (sizes[1:] + sizes[:-1]) / 2, np.float32([2.0**-149, 2.0**-127, 1e-30])])
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    found = np.unique(np.concatenate(around))
    found = found[found <= sizes[-1]]
    return np.concatenate([found, -found, np.float32([-0.0])])


def nearest_code(element: ElementType, value: float) -> int:
    """By search, the even code of two; what rounds to zero keeps its sign."""
    sizes = [(abs(element.decode(c) - abs(value)), c % 2, c) for c in range(1 << (element.bits - 1))]
    sign = np.signbit(value) << (element.bits - 1)
    return int(min(item for item in sizes if item[0] == item[0])[2] | sign)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("format_id", "rule"), [("v41_interleaved", "pow2_scale_floor"), ("v32_nope", "normal_floor"),
                                                ("v41_fp4_interleaved", "e4m3_scale_floor")])  # fmt: skip
def test_every_boundary_between_codes(format_id: str, rule: str, arch: str) -> None:
    """Groups whose first element is the largest number of the type: their scale is 1, so codes are of x itself."""
    record = kv_format(format_id)
    element = record.segment("values").element
    most = np.float32(np.nanmax(decoded(element)))
    points = boundaries(element)
    room = record.scale_group_dims - 1
    groups = -(-len(points) // room)
    tokens = -(-groups // record.scale_groups)
    x = np.zeros((tokens * record.scale_groups, record.scale_group_dims), np.float32)
    x[:, 0] = most
    filled = np.zeros(groups * room, np.float32)
    filled[: len(points)] = points
    x[:groups, 1:] = filled.reshape(groups, room)
    x = x.reshape(tokens, -1)
    pool = Pool.poisoned(record, tokens, 1)
    found = write(pool, rule, "fp32", x, np.arange(tokens, dtype=np.int32), arch)
    for token in range(tokens):
        packed = found.segment("values", token)
        codes = packed if element is E4M3 else np.stack([packed & 15, packed >> 4], 1).reshape(-1)
        assert codes.tolist() == [nearest_code(element, float(value)) for value in x[token]]
        one = {"fp32": np.float32(1).tobytes(), "ue8m0": b"\x7f", "ue4m3": b"\x38"}[
            record.segment("scales").element.name
        ]
        assert found.segment("scales", token).tobytes() == one * record.scale_groups


def test_the_codec_file_agrees_with_the_search() -> None:
    with np.load(VECTORS / "codec.npz") as data:
        for value, code in zip(data["e2m1_in_f32"], data["e2m1_even_keep"], strict=True):
            if np.isfinite(value):
                assert nearest_code(E2M1, float(value)) == code
        for value, code in zip(data["e4m3_in_f32"], data["e4m3_code"], strict=True):
            if np.isfinite(value):
                assert nearest_code(E4M3, float(np.clip(value, -448, 448))) == code


@pytest.mark.parametrize("arch", ARCHS)
def test_power_of_two_bytes_of_the_codec_file(arch: str) -> None:
    record = kv_format("v41_interleaved")
    with np.load(VECTORS / "codec.npz") as data:
        given, wanted = data["pow2_in_f32"], data["pow2_ceil_byte"]
    # t = amax / 448 is given back by 448 t only where that is exact.
    amax = (given.astype(np.float64) * 448).astype(np.float32)
    usable = np.isfinite(amax) & (amax.astype(np.float64) / 448 == given) & (given >= np.float32(1e-4))
    assert usable.sum() > 20
    amax, wanted = amax[usable], wanted[usable]
    tokens = -(-len(amax) // 16)
    x = np.zeros((tokens, 16, 32), np.float32)
    x.reshape(-1, 32)[: len(amax), 5] = -amax
    found = write(Pool.poisoned(record, tokens, 1), "pow2_scale_floor", "fp32", x.reshape(tokens, -1),
                  np.arange(tokens, dtype=np.int32), arch)  # fmt: skip
    bytes_found = np.concatenate([found.segment("scales", token) for token in range(tokens)])
    assert bytes_found[: len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("format_id", "rule", "amax", "stored"),
    [
        ("v41_interleaved", "pow2_scale_floor", 448.0, 127),
        ("v41_interleaved", "pow2_scale_floor", 448.5, 128),
        ("v41_interleaved", "pow2_scale_floor", 0.0, 114),
        ("v41_interleaved", "pow2_amax_floor", 0.0, 105),
        ("v41_fp4_interleaved", "e4m3_scale_floor", 6.0, 0x38),
        ("v41_fp4_interleaved", "e4m3_scale_floor", 0.0, 0x01),
        ("v41_fp4_interleaved", "e4m3_scale_floor", 1e30, 0x7E),
        ("v41_fp4_interleaved", "e4m3_scale_floor", np.inf, 0x7E),
        ("v41_fp4_interleaved", "e4m3_scale_floor", np.nan, 0x7F),
        ("v41_interleaved", "pow2_scale_floor", np.inf, 0xFF),
        ("v41_interleaved", "pow2_amax_floor", np.nan, 0xFF),
        ("v32_nope", "normal_floor", 0.0, 2.0**-126),
        ("v32_nope", "normal_floor_reciprocal", 0.0, 2.0**-126),
        ("v32_nope", "amax_floor", 0.0, np.float32(np.float32(1e-4) / np.float32(448))),
        ("v32_nope", "amax_floor_multiply", 11.0, np.float32(11) * np.float32(1 / 448)),
        ("v32_nope", "amax_floor", 11.0, np.float32(11) / np.float32(448)),
        ("v32_nope", "pow2_scale_floor", 300.0, 1.0),
        ("v32_nope", "pow2_amax_floor", 0.04, 2.0**-13),
        ("v32_nope", "pow2_scale_floor", 0.04, 2.0**-13),
        ("v32_nope", "pow2_amax_floor", 0.004, 2.0**-16),
        ("v32_nope", "pow2_scale_floor", 0.004, 2.0**-13),
    ],
)  # fmt: skip
def test_known_scales(format_id: str, rule: str, amax: float, stored: float) -> None:
    record = kv_format(format_id)
    x = np.zeros((1, record.d_qk), np.float32)
    x[0, 3] = amax
    found = write(Pool.poisoned(record, 1, 1), rule, "fp32", x, np.zeros(1, np.int32), "sm_80")
    scales = found.segment("scales", 0)
    if record.segment("scales").element is FP32:
        assert scales.view(np.float32)[0] == np.float32(stored)
    else:
        assert scales[0] == stored
    values = found.segment("values", 0)
    if not np.isfinite(amax) and rule != "e4m3_scale_floor":
        assert (values[: record.scale_group_dims] == 0x7F).all() and values[record.scale_group_dims] == 0


@pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
def test_nothing_but_named_slots_is_written(record: KvFormat) -> None:
    random = np.random.default_rng(3)
    for page_size, dtype in ((1, np.int32), (3, np.int64), (64, np.int64)):
        pages = max(2, 9 // page_size)
        pool = Pool.poisoned(record, pages, page_size)
        slots = np.concatenate([random.permutation(pool.tokens)[:4], [-1, pool.tokens, -(2**31), 2**31 - 1]]).astype(
            dtype
        )
        if dtype is np.int64:
            slots[4:6] = -(2**63), 2**40
        x = (random.integers(0, 2**15, (len(slots), record.d_qk)) % 0x4400).astype(np.uint16)
        found = write(pool, default_rule(record), "bf16", x, slots)
        named = {int(slot) for slot in slots if 0 <= slot < pool.tokens}
        assert len(named) == 4
        for name, before in pool.bytes_of.items():
            allowed = np.zeros(before.size, bool)
            for token in named:
                page, offset = divmod(token, page_size)
                for segment in (s for s in record.segments if s.tensor == name):
                    first = segment.byte_address(page, offset, 0, page_size, before.shape[1])
                    pad = record.format_id == "v4" and segment.name == "scales"
                    allowed[first : first + segment.size_bytes + pad] = True
            after = found.bytes_of[name]
            assert np.array_equal(after.reshape(-1)[~allowed], before.reshape(-1)[~allowed])
            if record.format_id == "v4":
                for token in named:
                    scales = record.segment("scales")
                    first = scales.byte_address(*divmod(token, page_size), 0, page_size, before.shape[1])
                    assert after.reshape(-1)[first + 7] == 0


@pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
def test_slots_outside_of_the_pool_read_as_zeros_and_are_not_touched(record: KvFormat) -> None:
    pool = Pool.poisoned(record, 2, 3)
    found = read(pool, np.array([-1, 6, 2**62, -(2**63)], np.int64))
    assert (found == 0).all()


def test_rules_give_the_same_bytes_on_every_schedule() -> None:
    record = kv_format("v32")
    x = np.random.default_rng(1).integers(0, 0x4300, (6, 576)).astype(np.uint16)
    for rule in rules_of(record):
        runs = [
            write(Pool.poisoned(record, 3, 2), rule, "bf16", x, np.arange(6, dtype=np.int32), seed=s) for s in (1, 2)
        ]
        assert np.array_equal(runs[0].bytes_of["k_cache"], runs[1].bytes_of["k_cache"])


def test_a_pool_that_is_smaller_than_told_is_noticed() -> None:
    pool = Pool.poisoned(kv_format("v41_page_split"), 2, 4)
    (name,) = pool.bytes_of
    short = replace(pool, bytes_of={name: pool.bytes_of[name][:, : 512 * 4]})
    with pytest.raises(HostModelError, match=name):
        read(short, np.array([7], np.int32))
