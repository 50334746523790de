"""Tensor copies: boxes of any rank inside, across and outside of a tensor, swizzled, stored, reduced, multicast."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory, coverage
from dsagen.errors import EmulatorError
from dsagen.tensor_map import ELEMENT_BYTES, TensorMap

RANDOM = np.random.default_rng(10)
TILE_BYTES = 8192
SHARED = f".shared .align 1024 .b8 tile[{TILE_BYTES}];\n.shared .align 8 .b8 bar[16];\n"
SETUP = (
    "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, tile; mov.u32 %r10, bar; setp.eq.u32 %p1, %r0, 0;\n"
)
INIT = "@%p1 mbarrier.init.shared.b64 [%r10], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;\n"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0; @!%p3 bra W;\n"
# Between the tile and global memory, a word of each thread at a time.
BESIDE = """
mad.lo.u32 %r2, %r0, 4, %r1; mad.wide.u32 %d2, %r0, 4, %d1; mul.lo.u32 %r3, %r0, 4;
L: setp.ge.u32 %p4, %r3, {bytes}; @%p4 bra E;
MOVE
add.u32 %r2, %r2, 128; add.u64 %d2, %d2, 128; add.u32 %r3, %r3, 128; bra L; E:
"""
DUMP = BESIDE.replace("MOVE", "ld.shared.u32 %r4, [%r2]; st.global.u32 [%d2], %r4;")
FILL = (
    BESIDE.replace("MOVE", "ld.global.u32 %r4, [%d2]; st.shared.u32 [%r2], %r4;") + "fence.proxy.async; bar.sync 0;\n"
)


def load_text(rank: int, bytes_: int, at: tuple[int, ...], space: str = "cta", tile: str = "") -> str:
    coordinates = ", ".join(str(c) for c in at)
    body = INIT + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {bytes_};\n"
    body += f"@%p1 cp.async.bulk.tensor.{rank}d.shared::{space}.global{tile}.mbarrier::complete_tx::bytes"
    return body + f" [%r1], [%d0, {{{coordinates}}}], [%r10];\n" + WAIT


def described(memory: Memory, array: np.ndarray, element: str, box: tuple[int, ...], **how: object) -> TensorMap:
    """The map of an array whose last axis is the fastest, with a `box` in the order of maps."""
    address = memory.add("tensor", array)
    return TensorMap(element, address, array.shape[::-1], array.strides[-2::-1], box, **how)  # type: ignore[arg-type]


def loaded(
    array: np.ndarray, element: str, box: tuple[int, ...], at: tuple[int, ...], seed: int = 0, **how: object
) -> np.ndarray:
    """The bytes of the tile after a load of the box at these coordinates."""
    memory = Memory()
    tensor_map = described(memory, array, element, box, **how)
    raw, out = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy(), np.zeros(TILE_BYTES, np.uint8)
    addresses = [memory.add("map", raw, writable=False), memory.add("out", out)]
    body = load_text(len(at), tensor_map.box_bytes, at) + DUMP.format(bytes=tensor_map.box_bytes)
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory, seed=seed)
    return out[: tensor_map.box_bytes]


def box_of(array: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], steps: tuple[int, ...] = ()) -> np.ndarray:
    """The elements that a box holds, zeros outside of the array."""
    steps = steps or (1,) * len(box)
    counts = [-(-extent // step) for extent, step in zip(box, steps, strict=True)]
    out = np.zeros(counts[::-1], array.dtype)
    for index in itertools.product(*map(range, counts)):
        place = [c + n * step for c, n, step in zip(at, index, steps, strict=True)]
        if all(0 <= p < size for p, size in zip(place, array.shape[::-1], strict=True)):
            out[index[::-1]] = array[tuple(place[::-1])]
    return out


def swizzled(data: bytes, row_bytes: int) -> bytes:
    """Where units of 16 bytes lie; the tile's address is a multiple of 1024."""
    units = [data[at : at + 16] for at in range(0, len(data), 16)]
    out = list(units)
    for n, unit in enumerate(units):
        out[n ^ (n // 8 % (row_bytes // 16))] = unit
    return b"".join(out)


SHAPES = {1: (50,), 2: (9, 40), 3: (4, 5, 24), 4: (3, 2, 4, 24), 5: (2, 3, 2, 3, 16)}
BOXES = {1: (32,), 2: (32, 4), 3: (16, 3, 2), 4: (16, 2, 2, 2), 5: (16, 2, 1, 3, 2)}


@pytest.mark.parametrize("rank", range(1, 6))
def test_boxes_inside_across_and_outside(rank: int) -> None:
    array = RANDOM.integers(1, 1 << 15, SHAPES[rank]).astype(np.uint16)
    array = np.pad(array, [(0, 0)] * (rank - 1) + [(0, -SHAPES[rank][-1] % 8)])
    places = [
        (0,) * rank,
        (8,) + (1,) * (rank - 1),
        (-8,) + (-1,) * (rank - 1),
        (array.shape[-1] - 8,) + (1,) * (rank - 1),
    ]
    places += [(-40,) + (0,) * (rank - 1), (1000,) * rank, (0,) * (rank - 1) + (-8 if rank == 1 else -1,)]
    for n, at in enumerate(places):
        found = loaded(array, "uint16", BOXES[rank], at, seed=n % 3)
        assert found.tobytes() == box_of(array, BOXES[rank], at).tobytes(), at


def rounded_to_tf32(codes: np.ndarray) -> np.ndarray:
    """Codes of fp32 to the nearest even of 10 bits; NaN becomes one."""
    up = codes + np.uint32(0xFFF) + (codes >> np.uint32(13) & np.uint32(1)) & np.uint32(0xFFFFE000)
    return np.where(codes & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFE000), up)


@pytest.mark.parametrize("element", ELEMENT_BYTES)
def test_elements_of_every_type(element: str) -> None:
    size = ELEMENT_BYTES[element]
    array = RANDOM.integers(0, 1 << 8 * size if size < 8 else 1 << 63, (12, 64), dtype=np.uint64).astype(f"u{size}")
    unit, box = 16 // size, (max(16, 32 // size), 6)
    for at in ((unit, 2), (-unit, -1), (64 - unit, 9)):
        found = loaded(array, element, box, at)
        want = box_of(array, box, at)
        if element.startswith("tfloat32"):
            want = rounded_to_tf32(want)
        assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (-8, -2), (64, 30)])
def test_swizzles(row_bytes: int, at: tuple[int, int]) -> None:
    array = RANDOM.integers(0, 1 << 16, (40, 80)).astype(np.uint16)
    box = (row_bytes // 2, 24)
    found = loaded(array, "bfloat16", box, at, swizzle_bytes=row_bytes)
    assert found.tobytes() == swizzled(box_of(array, box, at).tobytes(), row_bytes)


def test_every_second_row() -> None:
    array = RANDOM.integers(0, 1 << 16, (5, 20, 16)).astype(np.uint16)
    # A step in the first dimension does not count.
    steps = (4, 3, 2)
    found = loaded(array, "uint16", (16, 7, 4), (0, 2, -1), element_strides=steps)
    assert found.tobytes() == box_of(array, (16, 7, 4), (0, 2, -1), (1, 3, 2)).tobytes()


@pytest.mark.parametrize(("element", "dtype"), [("bfloat16", "u2"), ("float16", "u2"), ("float32", "u4")])
def test_what_lies_outside_as_nan(element: str, dtype: str) -> None:
    """16 bits of NaN, whatever the element."""
    array = RANDOM.integers(0, 1 << 15, (12, 64)).astype(dtype)
    by = 16 // array.itemsize
    found = loaded(array, element, (16, 6), (64 - by, 9), fill="nan").view(dtype).reshape(6, 16)
    outside = np.full(1, 0x7FF7, np.uint16).repeat(array.itemsize // 2).view(dtype)
    want = np.full((6, 16), outside)
    want[:3, :by] = array[9:, -by:]
    assert found.tobytes() == want.tobytes()


def test_rows_of_a_larger_tensor() -> None:
    whole = RANDOM.integers(0, 1 << 8, (20, 256)).astype(np.uint8)
    memory = Memory()
    address = memory.add("tensor", whole)
    tensor_map = TensorMap("uint8", address + 32, (100, 10), (512,), (64, 8))
    raw, out = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy(), np.zeros(512, np.uint8)
    addresses = [memory.add("map", raw), memory.add("out", out)]
    body = load_text(2, 512, (48, 3), "cluster", ".tile") + DUMP.format(bytes=512)
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory)
    assert out.tobytes() == box_of(whole[::2, 32:132], (64, 8), (48, 3)).tobytes()


# ---- stores ---------------------------------------------------------------------------------------------------------


def stored(
    array: np.ndarray, element: str, box: tuple[int, ...], at: tuple[int, ...], what: str = "cp", **how: object
) -> bytes:
    """The array after a store, or reduction, of random bytes; returns those."""
    memory = Memory()
    tensor_map = described(memory, array, element, box, **how)
    data = RANDOM.integers(0, 100, tensor_map.box_bytes, dtype=np.uint8)
    if element != "uint8":
        data[:] = RANDOM.integers(-9, 99, data.size // array.itemsize).astype(array.dtype).view(np.uint8)
    tile = data.tobytes()
    if tensor_map.swizzle_bytes:
        tile = swizzled(tile, tensor_map.swizzle_bytes)
    source = np.frombuffer(tile, np.uint8).copy()
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    addresses = [memory.add("map", raw), memory.add("source", source)]
    coordinates = ", ".join(map(str, at))
    kind, operation = ("cp.reduce", f".{what}") if what != "cp" else ("cp", "")
    body = FILL.format(bytes=source.size)
    body += f"@%p1 {kind}.async.bulk.tensor.{len(at)}d.global.shared::cta{operation}.tile.bulk_group"
    body += f" [%d0, {{{coordinates}}}], [%r1];"
    body += "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory, seed=2)
    return data.tobytes()


def put(array: np.ndarray, tile: np.ndarray, at: tuple[int, ...], of: np.ufunc | None = None) -> np.ndarray:
    """The array with a tile stored at these coordinates, or joined with what is there."""
    out = array.copy()
    for index in np.ndindex(tile.shape):
        place = tuple(n + c for n, c in zip(index, at[::-1], strict=True))
        if all(0 <= p < size for p, size in zip(place, out.shape, strict=True)):
            out[place] = tile[index] if of is None else of(out[place], tile[index])
    return out


@pytest.mark.parametrize("rank", range(1, 6))
def test_stores_leave_what_lies_outside(rank: int) -> None:
    shape = (*SHAPES[rank][:-1], -(-SHAPES[rank][-1] // 8) * 8)
    box = BOXES[rank]
    ones, rest = ((n,) * (rank - 1) for n in (1, 0))
    for at in ((8, *ones), (shape[-1] - 8, *rest), (shape[-1] - 8, *ones), (904,) * rank):
        array = RANDOM.integers(0, 1 << 15, shape).astype(np.uint16)
        before = array.copy()
        tile = np.frombuffer(stored(array, "uint16", box, at), np.uint16).reshape(box[::-1])
        assert array.tobytes() == put(before, tile, at).tobytes()


def test_a_store_of_every_second_row() -> None:
    array = RANDOM.integers(0, 1 << 15, (16, 24)).astype(np.uint16)
    before = array.copy()
    tile = np.frombuffer(stored(array, "uint16", (16, 6), (8, 3), element_strides=(1, 2)), np.uint16).reshape(3, 16)
    before[3:9:2, 8:24] = tile
    assert array.tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("element", "dtype", "width"), [("uint8", "u1", 70), ("bfloat16", "u2", 37), ("float32", "u4", 17)]
)
def test_a_store_fills_the_last_16_bytes_of_a_row(element: str, dtype: str, width: int) -> None:
    """Elements behind the tensor's last one are overwritten, and those behind these stay. Loads do not see them."""
    memory, whole = Memory(), np.full((8, 112 // np.dtype(dtype).itemsize), 7, dtype)
    by, end = 16 // whole.itemsize, 80 // whole.itemsize
    tensor_map = TensorMap(element, memory.add("tensor", whole), (width, 8), (112,), (4 * by, 4))
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    source = RANDOM.integers(8, 99, 4 * 64, dtype=np.uint8)
    addresses = [memory.add("map", raw), memory.add("source", source)]
    body = FILL.format(bytes=256) + "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    body += f" [%d0, {{{2 * by}, 0}}], [%r1]; @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory)
    want = np.full_like(whole, 7)
    want[:4, 2 * by : end] = source.view(dtype).reshape(4, -1)[:, : end - 2 * by]
    assert whole.tobytes() == want.tobytes()


@pytest.mark.parametrize("what", ["cp", "add"])
@pytest.mark.parametrize(("at", "said"), [((-8, 0), "-8 of dimension 0"), ((0, -1), "-1 of dimension 1")])
def test_stores_do_not_begin_ahead_of_their_tensor(what: str, at: tuple[int, int], said: str) -> None:
    with pytest.raises(EmulatorError, match=f"a store at coordinate {said}, which a device answers with an illegal"):
        stored(np.zeros((8, 64), np.uint32), "uint32", (16, 4), at, what)


def test_sums_of_fp32_keep_subnormals() -> None:
    """Unlike `red` of global memory."""
    array = np.full(32, 3, np.uint32)
    memory, source = Memory(), np.full(32, 5, np.uint32)
    addresses = [memory.add("to", array), memory.add("source", source)]
    body = FILL.format(bytes=128)
    body += "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r1], 128;"
    body += "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory)
    assert (array == 8).all()


def test_a_swizzled_store() -> None:
    array = RANDOM.integers(0, 1 << 8, (40, 256)).astype(np.uint8)
    before = array.copy()
    tile = np.frombuffer(stored(array, "uint8", (128, 16), (144, 30), swizzle_bytes=128), np.uint8).reshape(16, 128)
    assert array.tobytes() == put(before, tile, (144, 30)).tobytes()


COUNTED = {
    "inc": lambda old, by: 0 if old >= by else old + 1,
    "dec": lambda old, by: by if old == 0 or old > by else old - 1,
}


@pytest.mark.parametrize(("operation", "element"), [
    ("add", "float32"), ("add", "float16"), ("min", "int32"), ("max", "int64"), ("and", "uint32"), ("or", "uint64"),
    ("xor", "uint32"), ("inc", "uint32"), ("dec", "uint32"),
])  # fmt: skip
def test_reductions(operation: str, element: str) -> None:
    array = RANDOM.integers(0, 100, (20, 32)).astype(element)
    before = array.copy()
    of = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    of |= {"xor": np.bitwise_xor, **COUNTED}
    tile = np.frombuffer(stored(array, element, (16, 4), (24, 3), operation), element).reshape(4, 16)
    assert array.tolist() == put(before, tile, (24, 3), of[operation]).tolist()


# ---- a cluster, hints, faults ---------------------------------------------------------------------------------------


def test_a_multicast_of_a_map_that_is_a_parameter() -> None:
    memory, array, out = Memory(), RANDOM.integers(0, 1 << 30, (16, 32)).astype(np.uint32), np.zeros((2, 512), np.uint8)
    tensor_map = described(memory, array, "uint32", (32, 4))
    body = "ld.param.u64 %d1, [p1]; mov.u32 %r1, tile; mov.u32 %r10, bar; setp.eq.u32 %p1, %r0, 0;"
    body += "mov.u32 %r5, %cluster_ctarank; mad.wide.u32 %d1, %r5, 512, %d1; mov.b64 %d0, p0; cvta.param.u64 %d0, %d0;"
    body += "setp.eq.u32 %p2, %r5, 0; and.pred %p2, %p1, %p2; prefetch.tensormap [%d0];"
    body += "fence.proxy.tensormap::generic.acquire.gpu [%d0], 128; mov.u16 %h1, 3;"
    body += "createpolicy.fractional.L2::evict_last.b64 %d9, 1.0;"
    body += "@%p2 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d0, {0, 9}];"
    body += (
        INIT + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 512; barrier.cluster.arrive; barrier.cluster.wait;"
    )
    body += "@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    body += ".L2::cache_hint [%r1], [%d0, {0, 7}], [%r10], %h1, %d9;" + WAIT + DUMP.format(bytes=512)
    body += "barrier.cluster.arrive; barrier.cluster.wait;"
    text = kernel(body, 2, SHARED).replace(".param .u64 p0", ".param .align 64 .b8 p0[128]")
    raw = tensor_map.encode_for_emulator()
    words = np.frombuffer(raw, np.uint64).tolist()
    for seed in range(3):
        launch(text, [*words, memory.add(f"out{seed}", out)], memory, grid=2, cluster=2, seed=seed)
        assert out.tobytes() == 2 * array[7:11].tobytes()
        out[:] = 0


@pytest.mark.parametrize(("change", "said"), [
    (("[%r1]", "[%r1+64]"), "no multiple of 128"),
    (("{0, 0}", "{0, 0, 0}"), "the emulator does not have this instruction"),
    (("tensor.2d", "tensor.1d"), "the emulator does not have this instruction"),
    (("[%d0,", "[%d1,"), "was not encoded for the emulator (dsagen.tensor_map)"),
    (("[%d0,", "[%d0+8,"), "no multiple of 64"),
])  # fmt: skip
def test_copies_that_are_refused(change: tuple[str, str], said: str) -> None:
    memory = Memory()
    tensor_map = described(memory, np.zeros((8, 64), np.uint16), "uint16", (64, 4))
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    addresses = [memory.add("map", raw), memory.add("out", np.zeros(512, np.uint8))]
    text = load_text(2, 512, (0, 0))
    assert text.count(change[0]) == 1
    with pytest.raises(EmulatorError) as caught:
        launch(kernel(SETUP + text.replace(*change), 2, SHARED), addresses, memory)
    assert said in str(caught.value)


@pytest.mark.parametrize("at", [(4, 0), (-7, 0), (1001, 0)])
@pytest.mark.parametrize("text", [
    "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0, {AT}], [%r10];",
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d0, {AT}], [%r1];",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d0, {AT}], [%r1];",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d0, {AT}];",
], ids=lambda text: text.split()[0])  # fmt: skip
def test_a_box_lies_off_the_beginning_by_multiples_of_16_bytes(text: str, at: tuple[int, int]) -> None:
    """A device takes no other, not even outside of the tensor."""
    memory = Memory()
    tensor_map = described(memory, np.zeros((8, 64), np.uint16), "uint16", (64, 4))
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    addresses = [memory.add("map", raw), memory.add("out", np.zeros(512, np.uint8))]
    body = SETUP + "bar.warp.sync -1; @%p1 " + text.replace("{AT}", f"{{{at[0]}, {at[1]}}}")
    with pytest.raises(EmulatorError, match=f"coordinate {at[0]} of .* elements of 2 bytes: .* no multiple of 16"):
        launch(kernel(body, 2, SHARED), addresses, memory)


@pytest.mark.parametrize("text", [
    "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d0, {0, 0, 0}], "
    "[%r10], {%h1};",
    "cp.async.bulk.tensor.3d.global.shared::cta.im2col_no_offs.bulk_group [%d0, {0, 0, 0}], [%r1];",
    "cp.async.bulk.prefetch.tensor.3d.L2.global.im2col [%d0, {0, 0, 0}], {%h1};",
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %d1;",
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d0], [%r1], 128;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
], ids=lambda text: text.split()[0])  # fmt: skip
def test_what_is_not_there_is_named(text: str) -> None:
    """Maps are described for tiles, and are not made by kernels: who reads one would have to know of its parts."""
    opcode = text.split()[0]
    assert coverage(kernel(text)) == {opcode: 1}
    with pytest.raises(EmulatorError, match=re.escape(f"{opcode}: the emulator does not have this instruction")):
        launch(kernel(text), [0], Memory())


def test_ranks_have_to_agree() -> None:
    memory = Memory()
    tensor_map = described(memory, np.zeros((8, 64), np.uint16), "uint16", (64, 4))
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    addresses = [memory.add("map", raw), memory.add("out", np.zeros(512, np.uint8))]
    with pytest.raises(EmulatorError, match="a tensor map of rank 2 where the instruction has 3 coordinates"):
        launch(kernel(SETUP + load_text(3, 512, (0, 0, 0)), 2, SHARED), addresses, memory)


def test_a_tensor_that_is_larger_than_its_memory() -> None:
    memory, array = Memory(), np.zeros((8, 64), np.uint16)
    tensor_map = TensorMap("uint16", memory.add("tensor", array), (64, 9), (128,), (64, 4))
    raw = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy()
    addresses = [memory.add("map", raw), memory.add("out", np.zeros(512, np.uint8))]
    with pytest.raises(EmulatorError, match="0 bytes past the end of buffer tensor"):
        launch(kernel(SETUP + load_text(2, 512, (0, 6)), 2, SHARED), addresses, memory)
