"""Every form of wgmma against numpy: types, numbers of columns, swizzles, majors, operands in registers, scales."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product as combinations

import numpy as np
import pytest
from micro import kernel, launch
from warpgroup import ROW_BYTES, ROWS, THREADS, Layout, Product, arrays_of, expected, in_memory, inputs_of, run

from dsagen.emulator import Memory, coverage
from dsagen.errors import EmulatorError

SWIZZLES = (16, 32, 64, 128)
COLUMNS = range(8, 257, 8)


def fitting(form: Product, columns: int) -> Product:
    """The form with so many columns, in static shared memory."""
    wide = replace(form, columns=columns)
    return wide if wide.shared_bytes <= 48 << 10 else replace(wide, b=replace(wide.b, spread=1))


def forms() -> list[Product]:
    """All combinations of types, swizzles and majors that a type has, each for another number of columns."""
    found: list[Product] = []
    for to, kind in (("f32", "bf16"), ("f32", "f16"), ("f16", "f16")):
        for pattern, turned in combinations(SWIZZLES, ((False, False), (False, True), (True, False), (True, True))):
            other = SWIZZLES[(SWIZZLES.index(pattern) + turned[0] + 2 * turned[1]) % 4]
            found.append(Product(to, kind, kind, a=Layout(pattern, turned[0]), b=Layout(other, turned[1], 2)))
        found += [Product(to, kind, kind, a=None, b=Layout(p, t)) for p, t in combinations(SWIZZLES, (False, True))]
    for to, a, b in combinations(("f32", "f16"), ("e4m3", "e5m2"), ("e4m3", "e5m2")):
        found += [Product(to, a, b, a=Layout(p), b=Layout(SWIZZLES[-1 - n])) for n, p in enumerate(SWIZZLES)]
        found.append(Product(to, a, b, a=None))
    found += [Product("f32", "tf32", "tf32", a=Layout(p), b=Layout(p)) for p in SWIZZLES]
    found.append(Product("f32", "tf32", "tf32", a=None))
    found = [fitting(f, COLUMNS[-1 - n % len(COLUMNS)]) for n, f in enumerate(found)]
    for n, (a, b) in enumerate(combinations(("s8", "u8"), repeat=2)):
        found.append(Product("s32", a, b, (8, 24, 48, 256)[n], Layout(SWIZZLES[n]), Layout(), saturates=n % 2 == 0))
        found.append(Product("s32", a, b, 16 * (n + 2), None))
    found += [Product(adds=False), Product("f16", "f16", "f16", adds=False), Product("s32", "s8", "s8", adds=False)]
    found += [Product(scales=s, columns=8) for s in ((1, -1), (-1, 1), (-1, -1))]
    found.append(Product("f32", "e4m3", "e4m3", a=None, scales=(-1, 1), adds=False))
    return found


@pytest.mark.parametrize("form", forms(), ids=str)
def test_a_product(form: Product) -> None:
    inputs = inputs_of(form)
    found = run(form, inputs)
    want, scale = expected(form, inputs)
    if form.to == "s32" or form.a_type in ("e4m3", "e5m2"):
        assert np.array_equal(found, want)
    else:
        assert (np.abs(found - want) <= scale * (2.0**-10 if form.to == "f16" else 2.0**-20)).all()


def test_every_number_of_columns_is_among_the_forms() -> None:
    assert {form.columns for form in forms()} == set(COLUMNS)


@pytest.mark.parametrize("special", [0x7E, 0x7F])
def test_sums_of_fp8_with_what_is_no_number(special: int) -> None:
    """Infinite and NaN go through; what is finite beside them keeps its bits."""
    form = Product("f32", "e5m2", "e4m3", 16, adds=False)
    inputs = inputs_of(form)
    inputs.a[3, 5], inputs.b[:, 5] = (0x7C if special == 0x7E else special), 0x38
    found, want = run(form, inputs), expected(form, inputs)[0]
    assert np.array_equal(np.delete(found, 3, 0), np.delete(want, 3, 0))
    assert (np.isinf(found[3]) if special == 0x7E else np.isnan(found[3])).all()


def test_sums_of_fp8_are_cut_off_below_the_largest() -> None:
    """32 times 2^-11 beside 1 stays, of which 13 bits are kept; beside 8 it is lost, to which it is added.

    Which is the largest goes by exponents, so that 1.5 x 1.5 leaves as much as 1; but a sum that carries keeps less.
    """
    form = Product("f32", "e4m3", "e4m3", 8)
    inputs = inputs_of(form)
    inputs.a[:], inputs.b[:], inputs.c[:] = 0x10, 0x08, 1.0
    assert (run(form, inputs) == 1 + 2.0**-6).all()
    inputs.c[:] = 8.0
    assert (run(form, inputs) == 8).all()
    # Three times 2^-13 stay beside 1.5 x 1.5, and of what they make together the last bit is cut off.
    inputs.a[:], inputs.b[:], inputs.c[:] = 0, 0, 0.0
    inputs.a[:, 0], inputs.b[:, 0], inputs.a[:, 1:4], inputs.b[:, 1:4] = 0x3C, 0x3C, 0x08, 0x04
    assert (run(form, inputs) == 2.25 + 2.0**-12).all()


@pytest.mark.parametrize("pattern", [64, 128])
def test_a_start_may_lie_within_a_row_of_the_swizzle(pattern: int) -> None:
    """The pattern goes by addresses, so that the dims behind are reached by 32 bytes more in the descriptor."""
    form = Product(columns=16, a=Layout(pattern), b=Layout(pattern))
    inputs = inputs_of(form)
    plain = run(form, inputs)
    for ahead in range(32, pattern, 32):
        assert np.array_equal(run(form, inputs, form.text((ahead >> 4, ahead >> 4)), ahead), plain)


@pytest.mark.parametrize("text", [
    "m64n12k16.f32.bf16.bf16", "m64n8k16.f16.bf16.bf16", "m64n8k32.f32.bf16.bf16", "m64n8k32.f32.e4m3.bf16",
    "m64n40k32.s32.s8.s8", "m64n8k32.satfinite.f32.e4m3.e4m3", "m64n264k16.f32.f16.f16",
])  # fmt: skip
def test_forms_that_ptx_lacks_are_none(text: str) -> None:
    kernel = Product(columns=8).text().replace("m64n8k16.f32.bf16.bf16", text)
    assert coverage(kernel) == {f"wgmma.mma_async.sync.aligned.{text}": 1}


PLAIN = Product(columns=8)


def said(form: Product, old: str, new: str, **options: int) -> str:
    """What the emulator says to the form's kernel with one text of it replaced."""
    text = form.text()
    assert text.count(old) == 1, (old, text.count(old))
    with pytest.raises(EmulatorError) as caught:
        run(form, inputs_of(form), text.replace(old, new), **options)
    return str(caught.value)


FENCE, COMMIT, WAIT = (f"wgmma.{what}.sync.aligned" for what in ("fence", "commit_group", "wait_group"))
MMA = PLAIN.instruction("%d_0, %d_1, %d_2, %d_3", "%d4", "%d7", "%p2")
IN_REGISTERS = Product(columns=8, a=None)


@pytest.mark.parametrize(("old", "new", "message"), [
    (f"{FENCE};", "", r"a product with no wgmma.fence ahead of it"),
    (f"{FENCE};", f"{FENCE}; add.f32 %d_1, %d_1, %d_1;", r"%d_1 of the product was accessed after the last wgmma"),
    (f"{FENCE};", f"{FENCE}; add.f32 %r30, %d_1, %d_2;", r"%d_\d of the product was accessed after the last wgmma"),
    (f"{FENCE};", f"{FENCE}; add.f32 %r30, %r31, %r32; mov.b32 %d_1, %r30;", r"%d_1 of the product was accessed after"),
    (f"{WAIT} 0;", "", r"%d_0 is accessed, an accumulator of a product that no wgmma.wait_group has waited for"),
    (f"{WAIT} 0;", f"{WAIT} 1;", r"%d_0 is accessed, an accumulator of a product that no"),
    (f"{COMMIT};", "", r"%d_0 is accessed, an accumulator of a product that no"),
    (f"{COMMIT};", f"{COMMIT}; mov.b32 %r30, %d_3; add.f32 %r31, %r30, %r30;", r"%r30 is accessed, an accumulator"),
    (f"{COMMIT};", f"{COMMIT}; mov.b32 %d_3, 0;", r"%d_3 is accessed, an accumulator"),
    (f"{COMMIT};", f"{COMMIT}; ret;", r"exit with products of wgmma that were not waited for: the last is of group 1"),
    ("fence.proxy.async.shared::cta;", "", r"proxy: wgmma reads shared bytes \d+ to \d+, which warp \d, lane \d+"),
    ("bar.sync 0;", "", r"(race: read by wgmma of shared bytes|not written before)"),
    ("bar.sync 0;", "bar.warp.sync -1;", r"(race: read by wgmma of shared bytes|not written before)"),
    (f"{COMMIT};", f"{COMMIT}; st.shared.b32 [%r1], 0;", r"race: write of shared bytes 0 to 3, which wgmma of warps 0 "
     r"to 3 reads \(PTX line \d+\); nothing orders the two, and wgmma reads until a wgmma.wait_group"),
    (MMA, f"setp.lt.u32 %p3, %r0, 96; @%p3 {MMA}", r"lanes of warp 3 have exited"),
    (MMA, f"setp.lt.u32 %p3, %r0, 96; @%p3 {MMA} bar.sync 0;", r"deadlock(.|\n)*wait for other warps of the warpgroup"),
    (MMA, f"setp.lt.u32 %p3, %r0, 16; @%p3 {MMA}", r"deadlock(.|\n)*wait for other lanes of the warp"),
    (MMA, f"setp.lt.u32 %p3, %r0, 64; @%p3 bra A; {MMA} A: {MMA}", r"warp \d is here, others of its warpgroup"),
    (MMA, f"setp.eq.u32 %p3, %r0, 77; @%p3 add.u64 %d7, %d7, 1; {MMA}",
     r"the descriptor of B is \w+ in warp 0, lane 0, and \w+ in warp 2, lane 13"),
    (MMA, f"setp.gt.u32 %p2, %r0, 63; {MMA}", r"threads of warp \d disagree on whether to add"),
    (f"{FENCE};", f"{FENCE}; setp.lt.u32 %p3, %r0, 32; @%p3 bra A; {COMMIT}; A:",
     r"warp \d has committed \d groups, warp \d \d"),
    (MMA, f"or.b64 %d4, %d4, {1 << 14}; {MMA}", r"descriptor \w+ of A has bits set that are reserved"),
    (MMA, f"add.u64 %d7, %d7, 128; {MMA}", r"wgmma.mma_async: read of 16 bytes at shared byte \d+: the CTA has \d+"),
])  # fmt: skip
def test_what_must_not_be(old: str, new: str, message: str) -> None:
    assert re.search(message, said(PLAIN, old, new))


def test_a_base_offset_goes_with_a_swizzle() -> None:
    form = Product(columns=8, a=Layout(16))
    with pytest.raises(EmulatorError, match=r"descriptor \w+ of A has the base offset 1, and no swizzle that it would"):
        run(form, inputs_of(form), form.text((1 << 49, 0)))


@pytest.mark.parametrize(("pattern", "start"), [(128, 1), (128, 4), (128, 7), (64, 1), (64, 3), (32, 1)])
@pytest.mark.parametrize("based", [False, True])
def test_starts_behind_the_first_128_bytes_of_a_pattern(pattern: int, start: int, based: bool) -> None:
    """A base offset is taken off the bits of the address that exchange chunks."""
    form, base = Product(columns=16, a=Layout(pattern, spread=2)), start if based else 0
    assert form.a is not None
    inputs = inputs_of(form)
    r, byte = np.meshgrid(np.arange(ROWS), np.arange(0, ROW_BYTES, 2), indexing="ij")
    at = 128 * start + r // 8 * form.a.strides(ROWS)[1] + r % 8 * pattern + byte
    at ^= (at // 128 - base) % (pattern // 16) * 16
    image = arrays_of(form, inputs)[0]
    codes = image[at[..., None] + np.arange(2)].view(np.uint16)[..., 0]
    want = run(form, replace(inputs, a=codes))
    assert np.array_equal(run(form, inputs, form.text((start * 128 >> 4 | base << 49, 0))), want)


@pytest.mark.parametrize(("old", "new", "message"), [
    (f"{FENCE};", f"{FENCE}; cvt.rn.bf16x2.f32 %r11, %d_0, %d_1;", r"%r11 of the product was accessed after the last"),
    (f"{COMMIT};", f"{COMMIT}; xor.b32 %r12, %r12, 1;", r"%r12 is written, a register of A of a product that no"),
    (f"{COMMIT};", f"{COMMIT}; mov.b32 %r12, %r1;", r"%r12 is written, a register of A of a product that no"),
])  # fmt: skip
def test_registers_of_a(old: str, new: str, message: str) -> None:
    assert re.search(message, said(IN_REGISTERS, old, new))


@pytest.mark.parametrize(("form", "old", "new"), [
    # Copies, constants behind the fence, reads of A, and products one after the other are fine.
    (PLAIN, f"{FENCE};", f"{FENCE}; mov.b32 %r30, %d_0; mov.b32 %d_0, %r30;"),
    (PLAIN, f"{FENCE};", f"{FENCE}; mov.b32 %r30, 0f3f800000;"),
    (PLAIN, f"{COMMIT};", f"{COMMIT}; mov.b32 %r30, %d_0;"),
    (PLAIN, f"{WAIT} 0;", f"{COMMIT}; {WAIT} 1;"),
    (IN_REGISTERS, f"{COMMIT};", f"{COMMIT}; add.u32 %r30, %r12, 1;"),
])  # fmt: skip
def test_what_may_be(form: Product, old: str, new: str) -> None:
    inputs = inputs_of(form)
    assert np.array_equal(run(form, inputs, form.text().replace(old, new)), run(form, inputs))


def test_operands_that_change_are_noticed_without_checks_for_races() -> None:
    change = "setp.eq.u32 %p3, %r0, 9; @%p3 st.shared.b32 [%r1], 0x40404040; bar.sync 0;"
    message = said(PLAIN, f"{COMMIT};", f"{COMMIT}; {change}", races=False)
    assert "shared byte 0 was overwritten since the product at PTX line" in message


def test_a_block_that_is_no_warpgroup() -> None:
    memory = Memory()
    address = memory.add("nothing", np.zeros(32, np.uint32))
    with pytest.raises(EmulatorError, match="warp 0: it and those after it are no warpgroup of 128 threads"):
        launch(kernel(f"{FENCE}; {PLAIN.instruction('%r1, %r2, %r3, %r4', '%d4', '%d7', '%p2')}"), [address], memory)


@pytest.mark.parametrize(("form", "bytes_"), [(Product(), 32 * (64 + 64)), (Product(columns=8, a=None), 32 * 8)])
def test_counters(form: Product, bytes_: int) -> None:
    addresses, memory, _ = in_memory(form, inputs_of(form))
    found = launch(form.text(), addresses, memory, threads=THREADS, counters=True).measured
    assert found is not None
    assert (found.tensor_flops, found.wgmma_shared_bytes) == (2 * 64 * form.columns * 16, bytes_)
    assert found.instructions["tensor"] == 1
