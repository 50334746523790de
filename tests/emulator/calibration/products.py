"""wgmma: layouts by swizzle, major and type; what sums keep; what descriptors do that the emulator declines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from warpgroup import ROWS, THREADS, Inputs, Layout, Product, arrays_of, as_aligned, inputs_of, places

from calibration.case import Case

# Sums of 16-bit types are rounded otherwise than tensor cores do, at each product.
_NEAR = 2.0**-20
_FP8 = ("e4m3", "e5m2")


def _case(
    name: str, product: Product, inputs: Inputs, offsets: tuple[int, int] = (0, 0), ahead: int = 0, refused: str = ""
) -> Case:
    exact = product.to == "s32" or product.a_type in _FP8
    image, registers = arrays_of(product, inputs, ahead)
    kind = {"f16": "f2", "f32": "f4", "s32": "i4"}[product.to]
    shape = (product.results, THREADS, 2) if product.to == "f16" else (product.results, THREADS)
    within = 0.0 if exact else 2.0**-9 if product.to == "f16" else _NEAR
    text = product.text(offsets)
    case = Case(name, text, (image, registers), shape, kind, within=within, of_largest=not exact, refused=refused)
    # The model knows operands that lie where their layout has them.
    if refused or product.to == "s32" or "base" in name:
        return case
    return replace(case, model=lambda: as_aligned(product, inputs)[places(product.results, product.to == "f16")])


def layouts() -> list[Case]:
    """Each swizzle with each major and type."""
    found = []
    for pattern in (16, 32, 64, 128):
        plain, turned = Layout(pattern, spread=2), Layout(pattern, transposed=True)
        forms = [Product(columns=40, a=plain, b=plain), Product(columns=136, a=turned, b=turned)]
        forms += [Product(columns=24, a=None, b=turned), Product("f32", "e4m3", "e5m2", 64, plain, plain)]
        forms += [Product("f16", "f16", "f16", 72, turned, plain), Product("f32", "tf32", "tf32", 16, plain, plain)]
        forms += [Product("s32", "s8", "u8", 32, plain, plain, saturates=True)]
        found += [_case(f"wgmma.{form}", form, inputs_of(form, 31)) for form in forms]
    form = Product(columns=256, scales=(1, -1))
    found.append(_case(f"wgmma.{form}", form, inputs_of(form, 32)))
    found += [
        _case(f"wgmma.{form}", form, inputs_of(form, 33))
        for to in ("f32", "f16")
        for a in _FP8
        for form in [Product(to, a, a, 96, a=None)]
    ]
    form = Product(columns=16)
    found += [
        _case(f"wgmma.ahead{ahead}", form, inputs_of(form), (ahead >> 4, ahead >> 4), ahead) for ahead in (32, 64, 96)
    ]
    return found


def _probe(product: Product, code: dict[int, int], negative: int, one_and_half: int) -> Inputs:
    """One large summand and some small ones, which tells what is cut off.

    `code` gives the codes of 2^-n. Rows: 1 to 4 small products (r % 4), smaller ones (r / 4 % 2), negative ones (r / 8
    % 2), 1.5 x 1.5 instead of 1 (r / 16 % 2), from row 32 on what is added to instead of a product. Columns: from 2^-1
    on.
    """
    inputs = inputs_of(product)
    a, b, c = (np.zeros_like(array) for array in (inputs.a, inputs.b, inputs.c))
    large = [one_and_half if r // 16 % 2 else code[0] for r in range(ROWS)]
    for r in range(ROWS):
        c[r] = (2.25 if r // 16 % 2 else 1.0) if r >= 32 else 0.0
        a[r, 0] = large[r] if r < 32 else 0
        a[r, 1 : 2 + r % 4] = code[9 if r // 4 % 2 else 3] | (negative if r // 8 % 2 else 0)
        b[:, 0] = code[0]
    # B is common to all rows, so that 1.5 x 1 stands for 1.5 x 1.5 in half of the columns.
    half = product.columns // 2
    b[half:, 0] = one_and_half
    for n in range(product.columns):
        b[n, 1:] = code[1 + n % half % 9]
    return Inputs(a, b, c)


def sums() -> list[Case]:
    """What sums of a product's terms keep below the largest."""
    e4m3 = {n: (7 - n) << 3 if n < 7 else 1 << 9 - n for n in range(10)}
    e5m2 = {n: (15 - n) << 2 for n in range(10)}
    f16 = {n: (15 - n) << 10 for n in range(10)}
    bf16 = {n: (127 - n) << 7 for n in range(10)}
    rows = [("e4m3", e4m3, 0x80, 0x3C), ("e5m2", e5m2, 0x80, 0x3E)]
    rows += [("f16", f16, 0x8000, 0x3E00), ("bf16", bf16, 0x8000, 0x3FC0)]
    found = []
    for kind, code, negative, one_and_half in rows:
        form = Product("f32", kind, kind, 32)
        found.append(_case(f"wgmma.sums.{kind}", form, _probe(form, code, negative, one_and_half)))
    # What 0 times a large factor does to the others, which are 2^-12 and smaller.
    for kind, large, small in (("e4m3", 0x78, 0x08), ("e5m2", 0x78, 0x24)):
        form = Product("f32", kind, kind, 16)
        inputs = inputs_of(form)
        a, b, c = (np.zeros_like(array) for array in (inputs.a, inputs.b, inputs.c))
        a[:, 1:], b[:, 1:], b[:, 0] = small, small + np.arange(16)[:, None] % 8, large
        found.append(_case(f"wgmma.sums.zero.{kind}", form, Inputs(a, b, c)))
    # 25 bits below the largest: beyond what fp32 holds.
    form = Product("f32", "bf16", "bf16", 32)
    far = {n: (127 - (0 if n == 0 else n + 8)) << 7 for n in range(10)}
    found.append(_case("wgmma.sums.far", form, _probe(form, far, 0x8000, 0x3FC0)))
    return found


def base_offsets() -> list[Case]:
    """Operands that begin at later 128 bytes of a pattern, with and without the base offset that PTX asks for."""
    found = []
    for pattern, starts in ((128, (1, 4, 7)), (64, (1, 3)), (32, (1,))):
        form = Product(columns=16, a=Layout(pattern, spread=2), b=Layout())
        for start in starts:
            for base in (0, start):
                offsets = (start * 128 >> 4 | base << 49, 0)
                name = f"wgmma.base{base}.row{start}" + (f".of{pattern}" if pattern != 128 else "")
                found.append(_case(name, form, inputs_of(form), offsets))
    return found
