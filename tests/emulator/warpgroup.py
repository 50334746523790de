"""Products of a warpgroup as kernels of one wgmma.mma_async, their operands in memory, and what they should give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import exact
import micro
import numpy as np
from exact import FORMATS
from micro import kernel
from tensor_cores import KEPT, stored, summed

from dsagen.emulator import Memory

ROWS, THREADS, ROW_BYTES = 64, 128, 32
# Swizzles as a descriptor has them, by the bytes of a pattern's row; 16: none.
MODES = {16: 0, 128: 1, 64: 2, 32: 3}
WIDTHS = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Layout:
    """An operand in shared memory: bytes of the swizzle's row, whether rows are contiguous along k, room in between."""

    pattern: int = 128
    transposed: bool = False
    spread: int = 1

    def strides(self, rows: int) -> tuple[int, int]:
        """Leading and stride offset in bytes."""
        block = 8 * self.pattern * self.spread
        if self.pattern == 16:
            # Blocks of 8 rows lie behind each other, the second half of k behind all of them.
            return rows // 8 * block, block
        # Along k a swizzled operand that is not transposed has one block; its leading offset is not looked at.
        return (2 * block, block) if self.transposed else (16, block)

    def size(self, rows: int) -> int:
        """Bytes of an operand, a multiple of a pattern."""
        width = 2 if self.transposed else 1
        return -(-(int(self.offsets(rows, width).max()) + width) // 1024) * 1024

    def offsets(self, rows: int, width: int, ahead: int = 0) -> np.ndarray:
        """Byte offset of each element of `width` bytes, [rows, dims], from a start at a multiple of 1024.

        `ahead` bytes lie between that and where the operand begins.
        """
        leading, stride = self.strides(rows)
        r, byte = np.meshgrid(np.arange(rows), np.arange(0, ROW_BYTES, width), indexing="ij")
        k = byte // width
        if not self.transposed:
            half = leading if self.pattern == 16 else 16
            at = r // 8 * stride + r % 8 * self.pattern + byte // 16 * half + byte % 16
        elif self.pattern == 16:
            at = r // 8 * stride + r % 8 * 2 + k % 8 * 16 + k // 8 * leading
        else:
            wide = self.pattern // 2
            at = r // wide * leading + r % wide * 2 + k % 8 * self.pattern + k // 8 * stride
        at += ahead
        return at ^ (at >> 7 & (self.pattern // 16 - 1)) << 4

    def descriptor(self, rows: int, start: int) -> int:
        """Its bits, for an operand at this offset of an address that is added."""
        leading, stride = self.strides(rows)
        return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | MODES[self.pattern] << 62


@dataclass(frozen=True)
class Product:
    """One wgmma.mma_async; `a` None: A lies in registers."""

    to: str = "f32"
    a_type: str = "bf16"
    b_type: str = "bf16"
    columns: int = 64
    a: Layout | None = Layout()
    b: Layout = Layout()
    adds: bool = True
    scales: tuple[int, int] = (1, 1)
    saturates: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.a_type]

    @property
    def dims(self) -> int:
        return ROW_BYTES // self.width

    @property
    def results(self) -> int:
        """Registers of D."""
        return self.columns // (4 if self.to == "f16" else 2)

    @property
    def start_of_b(self) -> int:
        return 0 if self.a is None else self.a.size(ROWS)

    @property
    def shared_bytes(self) -> int:
        # All threads copy as much.
        return -(-(self.start_of_b + self.b.size(self.columns)) // (16 * THREADS)) * 16 * THREADS

    def __str__(self) -> str:
        def place(layout: Layout | None) -> str:
            return "regs" if layout is None else f"{layout.pattern}{'t' if layout.transposed else ''}x{layout.spread}"

        types = f"{self.to}.{self.a_type}.{self.b_type}"
        flags = f"{'' if self.adds else '-alone'}{'-sat' if self.saturates else ''}"
        return f"n{self.columns}.{types}-{place(self.a)}-{place(self.b)}{flags}{self.scales[0]:+}{self.scales[1]:+}"

    def instruction(self, d: str, a: str, b: str, adds: str) -> str:
        """The instruction with these operands."""
        tail = ""
        if self.to != "s32":
            tail = f", {self.scales[0]}, {self.scales[1]}"
        if self.width == 2:
            tail += (f", {int(self.a.transposed)}" if self.a else "") + f", {int(self.b.transposed)}"
        opcode = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.dims}"
        opcode += (".satfinite" if self.saturates else "") + f".{self.to}.{self.a_type}.{self.b_type}"
        return f"{opcode} {{{d}}}, {a}, {b}, {adds}{tail};"

    def text(self, offsets: tuple[int, int] = (0, 0)) -> str:
        """A kernel of 128 threads: p0 the image of shared memory, p1 registers [4 + results, 128], p2 results.

        `offsets` are added to the bits of both descriptors.
        """
        names = [f"%d_{n}" for n in range(self.results)]
        d, a = ", ".join(names), "{%r10, %r11, %r12, %r13}" if self.a is None else "%d4"
        bits = [0 if self.a is None else self.a.descriptor(ROWS, 0), self.b.descriptor(self.columns, self.start_of_b)]
        body = [f".reg .b32 %d_<{self.results}>;", *(f"ld.param.u64 %d{n}, [p{n}];" for n in range(3))]
        body += ["mov.u32 %r1, tile;", "mov.u32 %r2, %r0;"]
        body += [
            "COPY:", "shl.b32 %r3, %r2, 4;", "cvt.u64.u32 %d5, %r3;", "add.u64 %d5, %d5, %d0;",
            "ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d5];", "add.u32 %r4, %r1, %r3;",
            "st.shared.v4.b32 [%r4], {%r20, %r21, %r22, %r23};", f"add.u32 %r2, %r2, {THREADS};",
            f"setp.lt.u32 %p1, %r2, {self.shared_bytes // 16};", "@%p1 bra COPY;",
            "fence.proxy.async.shared::cta;", "bar.sync 0;",
        ]  # fmt: skip
        for n, name in enumerate(["%r10", "%r11", "%r12", "%r13", *names]):
            body += [f"mad.wide.u32 %d6, %r0, 4, %d1; ld.global.b32 {name}, [%d6+{4 * THREADS * n}];"]
        body += ["shr.u32 %r5, %r1, 4; and.b32 %r5, %r5, 0x3fff; cvt.u64.u32 %d6, %r5;"]
        body += [f"add.u64 %d{4 + 3 * n}, %d6, {bits[n] + offsets[n]};" for n in range(2)]
        body += [f"setp.ne.u32 %p2, {int(self.adds)}, 0;", "wgmma.fence.sync.aligned;"]
        body += [self.instruction(d, a, "%d7", "%p2"), "wgmma.commit_group.sync.aligned;"]
        body += ["wgmma.wait_group.sync.aligned 0;", "mad.wide.u32 %d6, %r0, 4, %d2;"]
        body += [f"st.global.b32 [%d6+{4 * THREADS * n}], {name};" for n, name in enumerate(names)]
        return kernel("\n".join(body), 3, f".shared .align 1024 .b8 tile[{self.shared_bytes}];\n")


@cache
def _table(kind: str) -> np.ndarray:
    return np.array([exact.as_float(FORMATS[kind].value(code)) for code in range(256)])


def values(kind: str, codes: np.ndarray) -> np.ndarray:
    """Codes of a type as fp64."""
    if kind == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "f16":
        return codes.view(np.float16).astype(np.float64)
    if kind == "tf32":
        return (codes & 0xFFFFE000).view(np.float32).astype(np.float64)
    if kind in ("s8", "u8"):
        return codes.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    return _table(kind)[codes]


def random_codes(random: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes of moderate numbers."""
    numbers = random.standard_normal(shape).astype(np.float32)
    if kind == "bf16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "f16":
        return numbers.astype(np.float16).view(np.uint16)
    if kind == "tf32":
        return numbers.view(np.uint32)
    codes = random.integers(0, 256, shape, np.uint8)
    if kind in ("s8", "u8"):
        return codes
    # Neither infinities nor NaN, and exponents that leave low bits to be cut off.
    return codes & (0xF7 if kind == "e5m2" else 0xBF)


@dataclass(frozen=True)
class Inputs:
    """Operands as codes, [64, dims] and [columns, dims], and what is added to, [64, columns]."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray


def inputs_of(product: Product, seed: int = 0) -> Inputs:
    random = np.random.default_rng(seed)
    shape = (ROWS, product.columns)
    if product.to == "s32":
        c = random.integers(-(2**31), 2**31, shape).astype(np.int32)
    else:
        c = random.standard_normal(shape).astype(np.float16 if product.to == "f16" else np.float32)
    a = random_codes(random, product.a_type, (ROWS, product.dims))
    return Inputs(a, random_codes(random, product.b_type, (product.columns, product.dims)), c)


def places(results: int, narrow: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the accumulators, [registers, threads] ([registers, threads, 2] where they hold two)."""
    i, thread = np.meshgrid(np.arange(results), np.arange(THREADS), indexing="ij")
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    if narrow:
        row, column = row + 8 * (i & 1), 8 * (i >> 1) + column
        return np.stack([row, row], -1), np.stack([column, column + 1], -1)
    return row + 8 * (i >> 1 & 1), 8 * (i >> 2) + column + (i & 1)


def arrays_of(product: Product, inputs: Inputs, ahead: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The image of shared memory in bytes, and registers [4 + results, 128] of A and D."""
    image = np.zeros(product.shared_bytes, np.uint8)
    for layout, start, codes in ((product.a, 0, inputs.a), (product.b, product.start_of_b, inputs.b)):
        if layout is not None:
            at = start + layout.offsets(len(codes), product.width, ahead)
            image[at[..., None] + np.arange(product.width)] = codes[..., None].view(np.uint8).reshape(*codes.shape, -1)
    registers = np.zeros((4 + product.results, THREADS), np.uint32)
    thread = np.arange(THREADS)
    per_register = 4 // product.width
    for z in range(4):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (z & 1)
        first = per_register * (thread % 4) + 4 * per_register * (z >> 1)
        codes = inputs.a[row[:, None], first[:, None] + np.arange(per_register)]
        registers[z] = np.ascontiguousarray(codes).view(np.uint32)[:, 0]
    taken = np.ascontiguousarray(inputs.c[places(product.results, product.to == "f16")])
    registers[4:] = taken.view(np.uint32).reshape(product.results, THREADS)
    return image, registers


def matrix_of(product: Product, registers: np.ndarray) -> np.ndarray:
    """D as [64, columns] of its registers [results, 128]."""
    kind = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[product.to]
    out = np.zeros((ROWS, product.columns), kind)
    at = places(product.results, product.to == "f16")
    out[at] = registers.view(kind).reshape(at[0].shape)
    return out


def in_memory(product: Product, inputs: Inputs, ahead: int = 0) -> tuple[list[int], Memory, np.ndarray]:
    """Arguments of the product's kernel, the memory that they point into, and the registers of D that it leaves."""
    image, registers = arrays_of(product, inputs, ahead)
    memory, out = Memory(), np.zeros((product.results, THREADS), np.uint32)
    addresses = [memory.add(name, array) for name, array in (("in", image), ("registers", registers), ("out", out))]
    return addresses, memory, out


def run(product: Product, inputs: Inputs, text: str = "", ahead: int = 0, **options: int) -> np.ndarray:
    """D as the emulator computes it, by the product's kernel or another one of its arrays."""
    addresses, memory, out = in_memory(product, inputs, ahead)
    micro.launch(text or product.text(), addresses, memory, threads=THREADS, **options)
    return matrix_of(product, out)


def expected(product: Product, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """D in fp64 (fp8: as its sums are cut off), and the sum of all magnitudes."""
    a = values(product.a_type, inputs.a) * product.scales[0] * product.scales[1]
    b = values(product.b_type, inputs.b)
    c = inputs.c.astype(np.float64) * product.adds
    scale = np.abs(a) @ np.abs(b.T) + np.abs(c)
    if product.a_type not in ("e4m3", "e5m2"):
        total = a @ b.T + c
        if product.to != "s32":
            return total, scale
        limits = (-(2.0**31), 2.0**31 - 1)
        return np.clip(total, *limits) if product.saturates else (total + 2**31) % 2**32 - 2**31, scale
    return as_aligned(product, inputs), scale


def as_aligned(product: Product, inputs: Inputs) -> np.ndarray:
    """D as tensor_cores.py has it."""
    kept, below = KEPT[product.a_type]
    a = values(product.a_type, inputs.a) * product.scales[0] * product.scales[1]
    c = inputs.c.astype(np.float64) * product.adds
    total = summed(a, values(product.b_type, inputs.b), c, product.a_type, product.b_type, kept)
    if product.to == "f32":
        return stored(total, below)
    with np.errstate(over="ignore"):
        # An f16 is rounded from all of the sum.
        return total.astype(np.float16)
