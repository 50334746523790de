"""Tensor copies: boxes inside, across and outside of tensors, their bytes at an mbarrier, and where rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from micro import kernel

from calibration.case import Case, Tiled
from dsagen.tensor_map import ELEMENT_BYTES, TensorMap

# Words of a lane that no copy wrote, and bytes behind a box that none may write.
UNTOUCHED = 0x5A5A5A5A
_BEHIND = 128
# Of a map that is a parameter, as cuda.h of CUDA 13 has it; it was 64 before.
_MAP_ALIGNMENT = 128
# How often a phase is asked about, for announced bytes may never come. `try_wait` may take long to say no.
TRIES = 1 << 20
# Bytes of the first dimension by which a box may lie off the tensor's beginning. A device answers others, in any place
# and of any copy, with an illegal instruction, which ends all that a process can do there.
_UNIT = 16
_UNALIGNED = "no multiple of 16"
# So it does stores and reductions of boxes that begin ahead of their tensor.
_AHEAD = "only loads may begin ahead of the tensor"
# What a text begins with: %d0 the map, %d1 the output, %r1 the tile, %r10 the mbarrier, %p1 thread 0 of 32.
_SETUP = """
mov.b64 %d0, p0; cvta.param.u64 %d0, %d0; ld.param.u64 %d1, [p{out}]; mov.u32 %r1, tile; mov.u32 %r10, bar;
setp.eq.u32 %p1, %r0, 0; mad.wide.u32 %d1, %r0, 4, %d1;
@%p1 mbarrier.init.shared.b64 [%r10], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
# A word of each lane at a time, of the tile and of global memory.
_BESIDE = """
mad.lo.u32 %r2, %r0, 4, %r1; mov.u64 %d2, %d{at}; mad.lo.u32 %r3, %r0, 4, 0;
{name}: setp.ge.u32 %p4, %r3, {bytes}; @%p4 bra E{name};
{move}
add.u32 %r2, %r2, 128; add.u64 %d2, %d2, 128; add.u32 %r3, %r3, 128; bra {name}; E{name}:
"""
_READY = "fence.proxy.async; bar.sync 0;\n"
_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"


def bounded_wait(name: str, parity: int, barrier: str = "%r10") -> str:
    """Sets %r6 to whether the phase came to its end. Lanes may leave the loop apart, and meet behind it."""
    return (
        f"mov.u32 %r5, 0;\n{name}: mbarrier.test_wait.parity.shared.b64 %p3, [{barrier}], {parity}; @%p3 bra E{name}; "
        f"add.u32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, {TRIES}; @%p4 bra {name};\nE{name}: bar.warp.sync -1; "
        "selp.u32 %r6, 1, 0, %p3;\n"
    )


def _text(body: str, arrays: int, tile_bytes: int) -> str:
    shared = f".shared .align 1024 .b8 tile[{tile_bytes}];\n.shared .align 8 .b8 bar[8];\n"
    text = kernel(_SETUP.format(out=arrays) + body, 1 + arrays, shared)
    return text.replace(".param .u64 p0", f".param .align {_MAP_ALIGNMENT} .b8 p0[128]", 1)


def _coordinates(at: Sequence[int]) -> str:
    return ", ".join(map(str, at))


def load(name: str, array: np.ndarray, tiled: Tiled, places: Sequence[tuple[int, ...]], refused: str = "") -> Case:
    """For each place: whether the box's bytes completed the phase (a word of each lane), the tile, what is behind."""
    tensor_map = tiled.of(array, 1 << 20)
    count = tensor_map.box_bytes
    # Rows that are narrower than what is swizzled may lie as far apart as that.
    widest = count // tensor_map.row_bytes * max(tensor_map.row_bytes, tiled.swizzle_bytes)
    size = -(-widest // 128) * 128 + _BEHIND
    fill = f"st.shared.u32 [%r2], {UNTOUCHED};"
    body = ""
    for n, at in enumerate(places):
        body += _BESIDE.format(name=f"F{n}", at=1, bytes=size, move=fill) + _READY
        body += f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {count};\n"
        body += f"@%p1 cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        body += f" [%r1], [%d0, {{{_coordinates(at)}}}], [%r10];\n" + bounded_wait(f"W{n}", n % 2)
        body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;\n"
        move = "ld.shared.u32 %r4, [%r2]; st.global.u32 [%d2], %r4;"
        body += _BESIDE.format(name=f"D{n}", at=1, bytes=size, move=move)
        body += f"add.u64 %d1, %d1, {size}; bar.sync 0;\n"
    shape = (len(places), 32 + size // 4)
    return Case(name, _text(body, 2, size), (array,), shape, "u4", threads=32, refused=refused, tiled=tiled)


def store(
    name: str, before: np.ndarray, tiled: Tiled, places: Sequence[tuple[int, ...]], operation: str = "",
    values: np.ndarray | None = None, refused: str = "",
) -> Case:  # fmt: skip
    """The tensor after boxes of values were stored into it, or joined with it."""
    tensor_map = tiled.of(before, 1 << 20)
    count = tensor_map.box_bytes
    count = count // tensor_map.row_bytes * max(tensor_map.row_bytes, tiled.swizzle_bytes)
    if values is None:
        values = np.random.default_rng(41).integers(0, 1 << 32, -(-count // 4), np.uint32)
    kind, how = ("cp.reduce", f".{operation}") if operation else ("cp", "")
    fill = "ld.global.u32 %r4, [%d2]; st.shared.u32 [%r2], %r4;"
    body = "ld.param.u64 %d4, [p1]; mad.wide.u32 %d4, %r0, 4, %d4;\n"
    body += _BESIDE.format(name="F", at=4, bytes=count, move=fill) + _READY
    for at in places:
        body += f"@%p1 {kind}.async.bulk.tensor.{len(at)}d.global.shared::cta{how}.tile.bulk_group"
        body += f" [%d0, {{{_coordinates(at)}}}], [%r1];\n"
    body += "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;\n"
    text = _text(body, 2, -(-count // 128) * 128)
    return Case(
        name, text, (values,), before.shape, before.dtype.str[1:], threads=32, refused=refused, tiled=tiled,
        before=before,
    )  # fmt: skip


_SHAPES = {1: (56,), 2: (9, 40), 3: (4, 5, 24), 4: (3, 2, 4, 24), 5: (2, 3, 2, 3, 16)}
_BOXES = {1: (32,), 2: (32, 4), 3: (16, 3, 2), 4: (16, 2, 2, 2), 5: (16, 2, 1, 3, 2)}


def _numbers(shape: tuple[int, ...], dtype: str = "u2", seed: int = 40) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(1, 255, (*shape[:-1], shape[-1] * size), np.uint8)
    return raw.view(dtype)


def _places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Inside, across each end of the fastest dimension and of the others, and outside of all."""
    rank, width = len(shape), shape[-1]
    rest, ones, before = (0,) * (rank - 1), (1,) * (rank - 1), (-1,) * (rank - 1)
    places = [(0, *rest), (8, *ones), (-8, *before), (width - 8, *ones), (-40, *rest), (1000,) * rank, (0, *before)]
    return [*places, (-(2**31), *rest), (2**31 - 8, *rest), (width, *rest)]


def _units(array: np.ndarray) -> int:
    """Elements that a box may lie off at least."""
    return _UNIT // array.itemsize


def ranks() -> list[Case]:
    """Boxes of one to five dimensions, loaded and stored."""
    found = []
    for rank, shape in _SHAPES.items():
        tiled = Tiled(0, "uint16", _BOXES[rank])
        found.append(load(f"tensor.load.{rank}d", _numbers(shape), tiled, _places(shape)))
        ones, before, rest = ((n,) * (rank - 1) for n in (1, -1, 0))
        for n, at in enumerate(((8, *ones), (-8, *before), (shape[-1] - 8, *rest), (904,) * rank)):
            name, out, refused = f"tensor.store.{rank}d.{n}", Tiled(1, "uint16", _BOXES[rank]), _AHEAD if n == 1 else ""
            found.append(store(name, _numbers(shape), out, [at], refused=refused))
    return found


def swizzles() -> list[Case]:
    """Each swizzle, with rows as wide as it and narrower, at edges; loaded and stored."""
    found = []

    def places(array: np.ndarray) -> list[tuple[int, int]]:
        by = _units(array)
        return [(0, 0), (by, 3), (-by, -2), (array.shape[1] - by, 30), (-25 * by, 0)]

    for swizzle in (0, 32, 64, 128):
        for row in (16, 32, 64, 128, 256):
            if swizzle and row > swizzle:
                continue
            tiled = Tiled(0, "bfloat16", (row // 2, 24), swizzle_bytes=swizzle)
            refused = "leaves gaps between such rows" if swizzle and row != swizzle else ""
            array = _numbers((40, 80))
            found.append(load(f"tensor.load.swizzle{swizzle}.row{row}", array, tiled, places(array), refused))
    for swizzle in (32, 64, 128):
        for element, dtype in (("uint8", "u1"), ("float32", "u4")):
            array = _numbers((40, 320 // np.dtype(dtype).itemsize), dtype)
            tiled = Tiled(0, element, (swizzle // array.itemsize, 20), swizzle_bytes=swizzle)
            found.append(load(f"tensor.load.swizzle{swizzle}.{element}", array, tiled, places(array)))
        out = Tiled(1, "bfloat16", (swizzle // 2, 16), swizzle_bytes=swizzle)
        found.append(store(f"tensor.store.swizzle{swizzle}", _numbers((40, 80)), out, [(72, 30)]))
    out, refused = Tiled(1, "bfloat16", (16, 16), swizzle_bytes=128), "leaves gaps between such rows"
    values = np.random.default_rng(42).integers(0, 1 << 32, 16 * 128 // 4, np.uint32)
    found.append(store("tensor.store.swizzle128.row32", _numbers((40, 80)), out, [(8, 3)], "", values, refused))
    return found


def elements() -> list[Case]:
    """Elements of each type, of which some may be rounded, or flushed; steps; and what lies outside as NaN."""
    found = []
    floats = _numbers((12, 64), "u4")
    # Subnormals, infinities, NaN, and bits below those of tf32.
    floats[0, :16] = [
        0x80000001, 0x1FFF, 0x007FFFFF, 0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x3F800FFF,
        0x3F801000, 0x3F801001, 0x3F803000, 0xBF803000, 0x7F7FFFFF, 0x00800000,
    ]  # fmt: skip
    for element, size in ELEMENT_BYTES.items():
        array = floats if size == 4 else _numbers((12, 64), f"u{size}")
        by = _units(array)
        tiled = Tiled(0, element, (max(16, 2 * by), 6))
        found.append(load(f"tensor.load.{element}", array, tiled, [(0, 0), (-by, -1), (64 - by, 9)]))
    for element in ("tfloat32", "float32_ftz"):
        out, values = Tiled(1, element, (16, 6)), floats[:6, :16].copy()
        found.append(store(f"tensor.store.{element}", np.zeros_like(floats), out, [(4, 2)], values=values))
    for element, dtype in (("bfloat16", "u2"), ("float16", "u2"), ("float32", "u4"), ("float64", "u8")):
        array = _numbers((12, 64), dtype)
        nan = Tiled(0, element, (16, 6), fill="nan")
        by = _units(array)
        places = [(0, 0), (-by, -1), (64 - by, 9)]
        found.append(load(f"tensor.load.{element}.nan", array, nan, places))
    stepped = Tiled(0, "uint16", (16, 7, 4), (4, 3, 2))
    steps = [(0, 2, -1), (0, 0, 0), (8, 18, 4), (0, -3, 1)]
    found.append(load("tensor.load.steps", _numbers((5, 20, 24)), stepped, steps))
    step = Tiled(1, "uint16", (16, 6), (1, 2))
    found.append(store("tensor.store.steps", _numbers((16, 24)), step, [(8, 3)]))
    return found


_REDUCED = (
    ("add", "uint32"), ("add", "int32"), ("add", "uint64"), ("add", "float32"), ("add", "float16"), ("add", "bfloat16"),
    ("min", "int32"), ("max", "uint32"), ("min", "int64"), ("max", "uint64"), ("min", "float16"), ("max", "bfloat16"),
    ("inc", "uint32"), ("dec", "uint32"), ("and", "uint32"), ("or", "uint64"), ("xor", "uint32"),
    ("add", "float32_ftz"),
)  # fmt: skip


def moderate(kind: str, count: int, seed: int) -> np.ndarray:
    """Numbers whose sums are rounded, as raw bits; among the floating-point ones subnormals."""
    random = np.random.default_rng(seed)
    if "float" not in kind:
        return random.integers(0, 100, count).astype(f"u{ELEMENT_BYTES[kind]}")
    numbers = (random.standard_normal(count) * 2.0 ** random.integers(-3, 3, count)).astype(np.float32)
    numbers[:4] = [1e-40, -2e-40, 3e-39, -1e-41]
    if kind == "float16":
        numbers[:4] = [6e-8, -3e-5, 1e-6, -6e-8]
        return numbers.astype(np.float16).view("u2")
    return numbers.view("u4") if kind == "float32" else (numbers.view("u4") >> 16).astype("u2")


def reductions() -> list[Case]:
    """Reductions of a box across the end of a tensor."""
    found = []
    for operation, element in _REDUCED:
        kind, refused = element.removesuffix("_ftz"), "elements that have none" if "_ftz" in element else ""
        before = moderate(kind, 20 * 32, 43).reshape(20, 32)
        # What the first values are joined with is as small.
        before[18, 24:28] = before[0, :4]
        values = moderate(kind, 64, 44)
        name = f"tensor.reduce.{operation}.{element}"
        found.append(store(name, before, Tiled(1, element, (16, 4)), [(24, 18)], operation, values, refused))
    return found


def parts() -> list[Case]:
    """Rows that end within 16 bytes, and what lies behind them: of another part of what the tensor is part of."""
    found = []
    for element, dtype, width in (("uint8", "u1", 70), ("bfloat16", "u2", 37), ("float32", "u4", 17)):
        array = _numbers((9, 80 // np.dtype(dtype).itemsize), dtype)
        by = _units(array)
        tiled = Tiled(0, element, (4 * by, 4), width=width)
        found.append(load(f"tensor.load.part.{element}", array, tiled, [(0, 0), (2 * by, 1), (4 * by, 7), (5 * by, 0)]))
        out = replace(tiled, array=1)
        found.append(store(f"tensor.store.part.{element}", array, out, [(2 * by, 7)]))
        values = moderate("uint8", 64 * 4, 45).view(dtype)
        if element != "uint8":
            found.append(store(f"tensor.reduce.part.{element}", array, out, [(2 * by, 7)], "add", values))
    return found


def unaligned() -> list[Case]:
    """Boxes off the beginning by less than 16 bytes, inside of the tensor and outside, which nothing may ask for."""
    array = _numbers((9, 40))
    tiled, out = Tiled(0, "uint16", (32, 4)), Tiled(1, "uint16", (32, 4))
    return [
        *(load(f"tensor.load.unaligned.{at[0]}", array, tiled, [at], _UNALIGNED) for at in ((1, 0), (4, 0), (1001, 0))),
        store("tensor.store.unaligned", array, out, [(4, 0)], refused=_UNALIGNED),
    ]


def alignments() -> list[Case]:
    """A map that lies at a multiple of 64 bytes, and not of 128."""
    tiled = Tiled(0, "uint16", (32, 4))
    plain = load("tensor.map.align64", _numbers((9, 40)), tiled, [(0, 0), (8, 1)])
    return [replace(plain, ptx=plain.ptx.replace(f".align {_MAP_ALIGNMENT} .b8 p0", ".align 64 .b8 p0"))]


def multicasts() -> list[Case]:
    """A box across two ends of a tensor for some CTAs of a cluster: what load() writes out, of each CTA."""
    found = []
    array = _numbers((40, 80))
    for size, ranks, swizzle in ((2, 0b11, 0), (2, 0b10, 128), (4, 0b1111, 128), (4, 0b0110, 64)):
        tiled = Tiled(0, "bfloat16", (swizzle // 2 or 32, 16), swizzle_bytes=swizzle)
        count = tiled.of(array, 1 << 20).box_bytes
        bytes_ = count + _BEHIND
        body = f"mov.u32 %r11, %cluster_ctarank; mul.lo.u32 %r12, %r11, {128 + bytes_}; cvt.u64.u32 %d3, %r12;\n"
        body += f"add.u64 %d1, %d1, %d3; mov.u16 %h1, {ranks}; mov.u32 %r13, {ranks}; shr.u32 %r13, %r13, %r11;\n"
        body += "and.b32 %r13, %r13, 1; setp.eq.u32 %p5, %r13, 1; and.pred %p6, %p5, %p1;\n"
        body += _BESIDE.format(name="F", at=1, bytes=bytes_, move=f"st.shared.u32 [%r2], {UNTOUCHED};") + _READY
        body += f"@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {count};\n" + _MEET
        body += f"setp.eq.u32 %p6, %r11, {size - 1}; and.pred %p6, %p6, %p1;\n"
        body += "@%p6 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        body += ".multicast::cluster [%r1], [%d0, {56, 30}], [%r10], %h1;\nmov.u32 %r6, 2; @!%p5 bra NONE;\n"
        body += bounded_wait("W", 0) + "NONE: st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;\n"
        body += _BESIDE.format(name="D", at=1, bytes=bytes_, move="ld.shared.u32 %r4, [%r2]; st.global.u32 [%d2], %r4;")
        text, shape = _text(body + _MEET, 2, bytes_), (size, 32 + bytes_ // 4)
        name = f"tensor.multicast{size}.{ranks:b}.swizzle{swizzle}"
        found.append(Case(name, text, (array,), shape, "u4", threads=32, grid=size, cluster=size, tiled=tiled))
    return found


# Descriptions at the limits of what a driver takes: what is changed of a plain one.
_LIMITS: dict[str, dict[str, object]] = {
    "plain": {}, "address": {"address": (1 << 20) + 8}, "address.16": {"address": (1 << 20) + 16},
    "size.most": {"sizes": (1 << 32, 16)}, "size.over": {"sizes": ((1 << 32) + 1, 16)}, "size.none": {"sizes": (64, 0)},
    "stride.unit": {"strides": (136,)}, "stride.less": {"strides": (64,)}, "stride.none": {"strides": (0,)},
    "stride.most": {"strides": ((1 << 40) - 16,)}, "stride.over": {"strides": (1 << 40,)},
    "box.most": {"box": (32, 256)}, "box.over": {"box": (32, 257)}, "box.none": {"box": (32, 0)},
    "box.wide": {"box": (256, 4)}, "box.row": {"box": (12, 4)}, "box.large": {"box": (256, 256)},
    "box.larger": {"box": (64, 32)}, "step.most": {"element_strides": (1, 8)}, "step.over": {"element_strides": (1, 9)},
    "step.none": {"element_strides": (1, 0)}, "step.first": {"element_strides": (8, 1)},
    "swizzle": {"swizzle_bytes": 128, "box": (64, 4)}, "swizzle.over": {"swizzle_bytes": 64, "box": (64, 4)},
    "swizzle.narrow": {"swizzle_bytes": 128, "box": (32, 4)}, "nan": {"fill": "nan"},
    "nan.integer": {"fill": "nan", "element": "uint16"}, "promotion": {"promotion_bytes": 256},
    "rank1": {"sizes": (64,), "strides": (), "box": (32,)},
    "rank5": {"sizes": (64, 3, 3, 3, 3), "strides": (128, 384, 1152, 3456), "box": (32, 1, 2, 1, 2)},
    **{f"element.{name}": {"element": name, "box": (16, 4)} for name in ELEMENT_BYTES},
}  # fmt: skip
_PLAIN: dict[str, object] = {
    "element": "bfloat16", "address": 1 << 20, "sizes": (64, 16), "strides": (128,), "box": (32, 4),
    "element_strides": (), "swizzle_bytes": 0, "promotion_bytes": 0, "fill": "zeros",
}  # fmt: skip


def descriptions() -> dict[str, dict[str, object]]:
    """What a driver is asked to encode, by name: fields of TensorMap."""
    return {name: _PLAIN | change for name, change in _LIMITS.items()}


def described(fields: dict[str, object]) -> TensorMap:
    """The map; GuardError for what we refuse."""
    return TensorMap(**fields)  # type: ignore[arg-type]
