"""Conversions over all codes, approximations, and what PTX leaves open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from calibration.case import Case, elementwise

# How near approximations come to each other, at most: each is as near to the function as PTX asks for.
_NEAR = 2.0**-20


def conversions() -> list[Case]:
    """Of codes of 8 and 16 bits all; of fp32 every ninth upper half, with four lower ones that decide ties."""
    codes = np.arange(256, dtype=np.uint16)
    every = np.arange(1 << 16, dtype=np.uint32)
    low = np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)
    floats = (every[::9] << 16 | low[np.arange(len(every[::9])) % 4])[: len(every) // 9 // 128 * 128]
    halves = every.astype(np.uint16)
    found = [
        elementwise(f"cvt.{to}.{of}", f"cvt.rn.{to}.{of} {{out}}, {{a}};", [codes], "u4")
        for to, of in (("f16x2", "e4m3x2"), ("f16x2", "e5m2x2"))
    ]
    twice = "mov.b32 %r90, {{{{a}}, {{a}}}}; cvt.rn.satfinite{1}.{0}.f16x2 {{out}}, %r90;"
    found += [
        elementwise(f"cvt.{to}.f16x2{relu}", twice.format(to, relu), [halves], "u2")
        for to in ("e4m3x2", "e5m2x2")
        for relu in ("", ".relu")
    ]
    two = "xor.b32 %r90, {a}, 0x80000000;"
    found += [
        elementwise(f"cvt.{to}.f32", f"{two} cvt.rn.satfinite.{to}.f32 {{out}}, {{a}}, %r90;", [floats], "u2")
        for to in ("e4m3x2", "e5m2x2")
    ]
    found += [
        elementwise(f"cvt.{how}.{to}.f32", f"{two} cvt.{how}.{to}.f32 {{out}}, {{a}}, %r90;", [floats], "u4")
        for to in ("f16x2", "bf16x2")
        for how in ("rn", "rz", "rn.relu")
    ]
    found.append(elementwise("cvt.tf32.f32", "cvt.rna.tf32.f32 {out}, {a};", [floats], "u4"))
    # Of NaN some become infinity in cutting off.
    odd = np.resize(np.array([0x7F800001, 0xFF801FFF, 0x7F802000, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F7FF000], np.uint32), 128)
    found += [
        elementwise(f"cvt.{how}.tf32.odd", f"cvt.{how}.tf32.f32 {{out}}, {{a}};", [odd], "u4")
        for how in ("rna", "rna.satfinite", "rn", "rz", "rn.relu")
    ]
    found += [
        elementwise(f"cvt.{how}.s32.f32", f"cvt.{how}.s32.f32 {{out}}, {{a}};", [floats], "u4")
        for how in ("rni", "rzi")
    ]
    found.append(elementwise("cvt.f32.f16", "cvt.f32.f16 {out}, {a};", [halves], "f4"))
    return found


def approximations() -> list[Case]:
    """Over the arguments that kernels give them: 4,096 each."""
    random = np.random.default_rng(11)
    small = (random.standard_normal(4096) * 2.0 ** random.integers(-12, 5, 4096)).astype(np.float32)
    wide = np.abs(random.standard_normal(4096) * 2.0 ** random.integers(-100, 100, 4096)).astype(np.float32)
    angles = random.uniform(-3.14, 3.14, 4096).astype(np.float32)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0], np.float32)
    for array in (small, wide):
        array[: len(ends)] = ends
    wide[3:4] = 2.0
    rows = [("ex2.approx.f32", small), ("ex2.approx.ftz.f32", small), ("lg2.approx.f32", wide)]
    rows += [("lg2.approx.ftz.f32", wide), ("rcp.approx.f32", wide), ("rcp.approx.ftz.f32", wide)]
    rows += [("rsqrt.approx.f32", wide), ("sqrt.approx.f32", wide), ("tanh.approx.f32", small)]
    rows += [("sin.approx.f32", angles), ("cos.approx.f32", angles)]
    # tanh keeps 11 bits. lg2 between 1/2 and 2, sin and cos are near in absolute terms only: twice what PTX allows.
    near, apart = {"tanh": 2.0**-10}, {"lg2": 2.0**-21, "sin": 2.0**-19.5, "cos": 2.0**-19.5}
    found = []
    for op, array in rows:
        case = elementwise(op, f"{op} {{out}}, {{a}};", [array], "f4", near.get(op.split(".")[0], _NEAR))
        found.append(replace(case, apart=apart.get(op.split(".")[0], 0.0)))
    return found


def open_questions() -> list[Case]:
    """What PTX leaves to the machine."""
    random = np.random.default_rng(12)
    a = random.integers(0, 1 << 32, 256, np.uint32)
    b = np.where(np.arange(256) % 2, a[::-1], 0).astype(np.uint32)
    b[2:4], a[2:4] = 0xFFFFFFFF, 0x80000000
    found = []
    for width in (32, 16, 64):
        values = (
            [a, b]
            if width == 32
            else [(x.astype(np.int32) if width == 64 else x).astype(f"u{width // 8}") for x in (a, b)]
        )
        found += [
            elementwise(f"{op}.{kind}{width}", f"{op}.{kind}{width} {{out}}, {{a}}, {{b}};", values, f"u{width // 8}")
            for op in ("div", "rem")
            for kind in ("u", "s")
        ]
    return found
