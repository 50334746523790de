"""mma.sync: what sums of a warp's product keep; and which lanes the matrix loads and stores give to whom."""

from __future__ import annotations

from functools import partial

import numpy as np
from micro import kernel
from tensor_cores import KEPT, stored, summed
from warpgroup import values

from calibration.case import Case

_CTAS = 48
# How near to sums that are rounded to nearest, of the largest one: those that are cut off at each of 16 terms, 24 bits
# below the largest term, or 13 bits below it at each of 32.
_PRODUCTS = {"bf16": (16, 2.0**-18), "f16": (16, 2.0**-18), "e4m3": (32, 2.0**-7), "e5m2": (32, 2.0**-7)}


def _codes(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Registers full of numbers of either sign, from 2^-8 to 2^3, with all of their bits in use."""
    if kind in ("bf16", "f16"):
        numbers = random.standard_normal((*shape, 2)) * 2.0 ** random.integers(-6, 2, (*shape, 2))
        if kind == "f16":
            bits = numbers.astype(np.float16).view(np.uint16)
        else:
            bits = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.ascontiguousarray(bits).view(np.uint32)[..., 0]
    # Exponents around the bias, any mantissa and sign.
    exponents = random.integers(1, 10, (*shape, 4)) if kind == "e4m3" else random.integers(9, 18, (*shape, 4))
    width = 3 if kind == "e4m3" else 2
    codes = random.integers(0, 2, (*shape, 4)) << 7 | exponents << width | random.integers(0, 1 << width, (*shape, 4))
    return np.ascontiguousarray(codes.astype(np.uint8)).view(np.uint32)[..., 0]


def _matrices(kind: str, registers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [CTAs, 16, k], B [CTAs, 8, k] and C [CTAs, 16, 8] of the registers of a CTA's lanes."""
    width, lane = _PRODUCTS[kind][0] // 8, np.arange(32)
    group, quad = lane // 4, lane % 4
    codes = np.ascontiguousarray(registers[:, :6]).view(np.uint16 if width == 2 else np.uint8)
    numbers = values(kind, codes).reshape(len(registers), 6, 32, width)
    a, b, c = (np.zeros((len(registers), rows, 8 * width)) for rows in (16, 8, 16))
    c = c[..., :8]
    for z, i in np.ndindex(4, width):
        a[:, group + 8 * (z & 1), width * quad + i + 4 * width * (z >> 1)] = numbers[:, z, :, i]
    for z, i in np.ndindex(2, width):
        b[:, group, width * quad + i + 4 * width * z] = numbers[:, 4 + z, :, i]
    for z in range(4):
        c[:, group + 8 * (z >> 1), 2 * quad + (z & 1)] = registers[:, 6 + z].view(np.float32)
    return a, b, c


def _model(kind: str, registers: np.ndarray) -> np.ndarray:
    """Registers of D. ptxas makes two products of f16 of one of fp8, and adds C to them in fp32."""
    a, b, c = _matrices(kind, registers)
    kept, below = KEPT["f16"]
    if kind in ("bf16", "f16"):
        d = stored(summed(a, b, c, kind, kind, kept), below)
    else:
        d = np.zeros_like(c)
        for half in range(2):
            dims = [n for n in range(a.shape[-1]) if n % 4 // 2 == half]
            d = stored(summed(a[..., dims], b[..., dims], d, "f16", "f16", kept), below)
        d = c.astype(np.float32) + d
    lane = np.arange(32)
    return np.stack([d[:, lane // 4 + 8 * (z >> 1), 2 * (lane % 4) + (z & 1)] for z in range(4)], 1)


def sums() -> list[Case]:
    """Products of random numbers in many CTAs, half of them added to larger ones."""
    found = []
    for kind, (dims, within) in _PRODUCTS.items():
        random = np.random.default_rng(61)
        registers = np.zeros((_CTAS, 10, 32), np.uint32)
        registers[:, :6] = _codes(kind, (_CTAS, 6, 32), random)
        added = random.standard_normal((_CTAS, 4, 32)) * np.where(np.arange(_CTAS) % 2, 64.0, 0.0)[:, None, None]
        registers[:, 6:] = added.astype(np.float32).view(np.uint32)
        body = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, %ctaid.x;\n"
        body += "mad.wide.u32 %d0, %r1, 1280, %d0; mad.wide.u32 %d0, %r0, 4, %d0;\n"
        body += "mad.wide.u32 %d1, %r1, 512, %d1; mad.wide.u32 %d1, %r0, 4, %d1;\n"
        body += "".join(f"ld.global.b32 %r{10 + n}, [%d0+{128 * n}];\n" for n in range(10))
        d = "{%r16, %r17, %r18, %r19}"
        body += f"mma.sync.aligned.m16n8k{dims}.row.col.f32.{kind}.{kind}.f32 {d}, {{%r10, %r11, %r12, %r13}}, "
        body += f"{{%r14, %r15}}, {d};\n"
        body += "".join(f"st.global.b32 [%d1+{128 * n}], %r{16 + n};\n" for n in range(4))
        how = {
            "threads": 32,
            "grid": _CTAS,
            "within": within,
            "of_largest": True,
            "model": partial(_model, kind, registers),
        }
        found.append(Case(f"mma.sums.{kind}", kernel(body, 2), (registers,), (_CTAS, 4, 32), "f4", **how))  # type: ignore[arg-type]
    return found


_FORMS = {
    "ldmatrix.x1": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r2];",
    "ldmatrix.x2.trans": "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r20, %r21}, [%r2];",
    "ldmatrix.x4": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r2];",
    "ldmatrix.x4.trans": "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r20, %r21, %r22, %r23}, [%r2];",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r10;",
    "stmatrix.x4": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r10, %r11, %r12, %r13};",
    "stmatrix.x2.trans": "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r2], {%r10, %r11};",
}


def matrices() -> list[Case]:
    """Each lane's registers, and then the tile, behind one instruction whose rows lie in another order."""
    found = []
    image = np.random.default_rng(62).integers(0, 1 << 32, 256, np.uint32)
    for name, text in _FORMS.items():
        body = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, tile; mad.lo.u32 %r3, %r0, 4, %r1;\n"
        body += "mad.wide.u32 %d0, %r0, 4, %d0; mad.wide.u32 %d1, %r0, 4, %d1;\n"
        body += "".join(f"ld.global.b32 %r4, [%d0+{128 * n}]; st.shared.b32 [%r3+{128 * n}], %r4;\n" for n in range(4))
        body += "".join(f"ld.global.b32 %r{10 + n}, [%d0+{512 + 128 * n}]; mov.b32 %r{20 + n}, 0;\n" for n in range(4))
        body += "mul.lo.u32 %r2, %r0, 5; and.b32 %r2, %r2, 31; mad.lo.u32 %r2, %r2, 16, %r1; bar.warp.sync -1;\n"
        body += text + " bar.warp.sync -1;\n"
        body += "".join(f"st.global.b32 [%d1+{128 * n}], %r{20 + n};\n" for n in range(4))
        body += "".join(
            f"ld.shared.b32 %r4, [%r3+{128 * n}]; st.global.b32 [%d1+{512 + 128 * n}], %r4;\n" for n in range(4)
        )
        declarations = ".shared .align 16 .b8 tile[512];\n"
        found.append(Case(name, kernel(body, 2, declarations), (image,), (8, 32), "u4", threads=32))
    return found
