"""Forms that no other file has: rare arithmetic, predicates, calls, hints, the life of an mbarrier."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from micro import compute, kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(31)
TINY = np.float32(2.0**-126)
BAR = ".shared .align 8 .b8 bar[16];\n.shared .align 16 .b8 tile[512];\n"
INIT = "mov.u32 %r10, bar; setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [%r10], {count}; bar.sync 0;\n"


def floats(count: int = 32, dtype: type = np.float32) -> np.ndarray:
    values = RANDOM.standard_normal(count).astype(dtype)
    values[:8] = [0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, 1e-40, -1e-40]
    return values


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize(("text", "want"), [
    ("abs.f64", np.abs), ("neg.f64", np.negative), ("rsqrt.approx.f64", lambda a: 1 / np.sqrt(a)),
])  # fmt: skip
def test_doubles(text: str, want: Callable[..., np.ndarray]) -> None:
    a = floats(dtype=np.float64)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(compute(f"{text} {{out}}, {{a}};", [a], np.float64), want(a), rtol=1e-12)


@pytest.mark.parametrize(("bits", "dtype"), [(32, np.float32), (64, np.float64)])
def test_copysign_takes_the_sign_of_the_first(bits: int, dtype: type) -> None:
    a, b = floats(dtype=dtype), RANDOM.permutation(floats(dtype=dtype))
    found = compute(f"copysign.f{bits} {{out}}, {{a}}, {{b}};", [a, b], dtype)
    assert found.tobytes() == np.copysign(b, a).tobytes()


@pytest.mark.parametrize(("text", "want", "error"), [
    ("abs.ftz.f32", np.abs, 0), ("neg.ftz.f32", np.negative, 0),
    ("rcp.approx.ftz.f32", lambda a: 1 / a, 1e-6), ("rsqrt.approx.ftz.f32", lambda a: 1 / np.sqrt(a), 1e-6),
    ("sin.approx.ftz.f32", np.sin, 2e-6),
])  # fmt: skip
def test_one_operand_without_subnormals(text: str, want: Callable[..., np.ndarray], error: float) -> None:
    a = floats()
    with np.errstate(all="ignore"):
        expected = flushed(want(flushed(a)))
    np.testing.assert_allclose(compute(f"{text} {{out}}, {{a}};", [a], np.float32), expected, rtol=error, atol=error)


@pytest.mark.parametrize(("text", "want"), [
    ("min.ftz.f32", np.fmin), ("max.ftz.f32", np.fmax), ("div.rn.ftz.f32", np.divide),
])  # fmt: skip
def test_two_operands_without_subnormals(text: str, want: Callable[..., np.ndarray]) -> None:
    a, b = floats(), RANDOM.permutation(floats())
    with np.errstate(all="ignore"):
        expected = flushed(want(flushed(a), flushed(b)))
    np.testing.assert_array_equal(compute(f"{text} {{out}}, {{a}}, {{b}};", [a, b], np.float32), expected)


SIGNED = {"u": False, "s": True}


def parts(words: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    kinds = {(8, True): np.int8, (8, False): np.uint8, (16, True): np.int16, (16, False): np.uint16}
    return words.view(kinds[bits, signed]).reshape(len(words), -1).astype(np.int64)


@pytest.mark.parametrize(("x", "y"), list(product("us", "us")))
def test_dot_products(x: str, y: str) -> None:
    a, b, c = (RANDOM.integers(0, 1 << 32, 32, dtype=np.uint32) for _ in range(3))
    each = parts(b, 8, SIGNED[y])
    want = (parts(a, 8, SIGNED[x]) * each).sum(1) + c
    found = compute(f"dp4a.{x}32.{y}32 {{out}}, {{a}}, {{b}}, {{c}};", [a, b, c], np.uint32)
    assert found.tolist() == (want & 0xFFFFFFFF).tolist()
    for half, first in (("lo", 0), ("hi", 2)):
        want = (parts(a, 16, SIGNED[x]) * each[:, first : first + 2]).sum(1) + c
        found = compute(f"dp2a.{half}.{x}32.{y}32 {{out}}, {{a}}, {{b}}, {{c}};", [a, b, c], np.uint32)
        assert found.tolist() == (want & 0xFFFFFFFF).tolist()


@pytest.mark.parametrize("sign", "us")
def test_wide_products(sign: str) -> None:
    for bits in (16, 32):
        dtype = np.dtype(f"{'i' if sign == 's' else 'u'}{bits // 8}")
        info = np.iinfo(dtype)
        a, b = (RANDOM.integers(info.min, info.max, 32, dtype=dtype, endpoint=True) for _ in range(2))
        result = np.dtype(f"{'i' if sign == 's' else 'u'}{bits // 4}").type
        found = compute(f"mul.wide.{sign}{bits} {{out}}, {{a}}, {{b}};", [a, b], result)
        assert found.tolist() == [int(x) * int(y) for x, y in zip(a, b, strict=True)]


def test_bits_of_64() -> None:
    a = RANDOM.integers(0, 1 << 63, 32, dtype=np.uint64) >> RANDOM.integers(0, 63, 32, dtype=np.uint64)
    a[:3] = [0, 1, (1 << 64) - 1]
    found = compute("bfind.u64 {out}, {a};", [a], np.uint32)
    assert found.tolist() == [(int(x).bit_length() - 1) & 0xFFFFFFFF for x in a]
    lengths = [int(x if x < 1 << 63 else ~x).bit_length() for x in a]
    found = compute("bfind.shiftamt.s64 {out}, {a};", [a], np.uint32)
    assert found.tolist() == [0xFFFFFFFF if n == 0 else 64 - n for n in lengths]


def test_sums_of_two_words() -> None:
    a, b = (RANDOM.integers(0, 1 << 64, 32, dtype=np.uint64) for _ in range(2))
    body = "mov.b64 {%r1, %r2}, {a}; mov.b64 {%r3, %r4}, {b}; add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4;"
    found = compute(body + "mov.b64 {out}, {%r5, %r6};", [a, b], np.uint64)
    assert found.tolist() == (a + b).tolist()


@pytest.mark.parametrize(("name", "of"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
def test_predicates(name: str, of: Callable[[bool, bool], bool]) -> None:
    lane = np.arange(32, dtype=np.uint32)
    body = "and.b32 %r1, {a}, 1; setp.ne.u32 %p1, %r1, 0; setp.gt.u32 %p2, {a}, 11;"
    body += f"{name}.pred %p3, %p1, %p2; mov.pred %p4, %p3; not.pred %p5, %p4; selp.u32 {{out}}, 0, 1, %p5;"
    assert compute(body, [lane], np.uint32).tolist() == [int(of(bool(n & 1), n > 11)) for n in range(32)]


def test_whether_all_lanes_hold_one_64_bit_value() -> None:
    body = "match.all.sync.b64 %r1|%p1, {a}, -1; selp.u32 %r2, 1, 0, %p1; xor.b32 {out}, %r1, %r2;"
    same = np.full(32, 1 << 40, np.uint64)
    assert compute(body, [same], np.uint32).tolist() == [0xFFFFFFFE] * 32
    same[7] += 1 << 50
    assert compute(body, [same], np.uint32).tolist() == [0] * 32


def test_moves_of_128_bits() -> None:
    a, b = (RANDOM.integers(0, 1 << 64, 32, dtype=np.uint64) for _ in range(2))
    body = ".reg .b128 q<3>; mov.b128 q1, {{a}, {b}}; mov.b128 q2, q1; mov.b128 {%d30, %d31}, q2;"
    assert compute(body + "sub.u64 {out}, %d30, %d31;", [a, b], np.uint64).tolist() == (a - b).tolist()


FUNCTION = """.func (.param .b32 r) twice(.param .b32 a)
{ .reg .b32 x; ld.param.b32 x, [a]; add.u32 x, x, x; st.param.b32 [r], x; ret; }
"""
OUT = "ld.param.u64 %d0, [p0]; mad.wide.u32 %d1, %r0, 4, %d0;\n"


def results(body: str, declarations: str = "", **options: int) -> list[int]:
    """%r1 of each lane."""
    memory, out = Memory(), np.zeros(32, np.uint32)
    launch(
        kernel(OUT + body + "st.global.u32 [%d1], %r1;", 1, declarations), [memory.add("out", out)], memory, **options
    )
    return out.tolist()


def test_calls() -> None:
    body = "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r0; call.uni (q), twice, (p); ld.param.b32 %r1, [q]; }"
    assert results(body, FUNCTION) == [2 * n for n in range(32)]


def test_branches_by_a_table() -> None:
    body = "T: .branchtargets A, B, C;\nmov.u32 %r1, 9; rem.u32 %r2, %r0, 3; brx.idx %r2, T;\n"
    body += "A: mov.u32 %r1, 5; bra.uni C;\nB: mov.u32 %r1, 7;\nC:\n"
    assert results(body) == [[5, 7, 9][n % 3] for n in range(32)]


@pytest.mark.parametrize("text", [
    "nanosleep.u32 20;", "pmevent 3;", "griddepcontrol.launch_dependents;", "setmaxnreg.dec.sync.aligned.u32 40;",
    "prefetch.global.L2 [%d1];", "discard.global.L2 [%d0], 128;", "fence.proxy.alias;",
    "membar.gl; fence.sc.cta; fence.acq_rel.sys;",
])  # fmt: skip
def test_what_changes_no_value(text: str) -> None:
    assert results(f"mov.u32 %r1, %r0; {text}") == list(range(32))


def test_clocks_go_on() -> None:
    body = "mov.u32 %r2, %clock; mov.u64 %d5, %clock64; mov.u32 %r3, %clock; sub.u32 %r1, %r3, %r2;"
    assert all(0 <= passed < 1000 for passed in results(body))


def test_words_that_are_loaded_for_all_lanes() -> None:
    memory, out = Memory(), np.arange(32, dtype=np.uint32)
    launch(kernel(OUT + "ldu.global.u32 %r1, [%d1]; add.u32 %r1, %r1, 1; st.global.u32 [%d1], %r1;"),
           [memory.add("out", out)], memory)  # fmt: skip
    assert out.tolist() == list(range(1, 33))


@pytest.mark.parametrize("text", ["trap", "brkpt"])
def test_traps_name_the_first_lane(text: str) -> None:
    with pytest.raises(EmulatorError, match=rf"{text if text == 'trap' else ''}.*\n.*thread 5 ") as caught:
        results(f"setp.gt.u32 %p1, %r0, 4; @%p1 {text}; mov.u32 %r1, 1;")
    assert re.search(r"PTX line \d+", str(caught.value))
    assert results(f"setp.gt.u32 %p1, %r0, 40; @%p1 {text}; mov.u32 %r1, 1;") == [1] * 32


@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_the_life_of_an_mbarrier(order: str) -> None:
    """Two phases, of which the second has a state for its token; then no more a barrier, and one again."""
    acquire = order or ".acquire.cta"
    body = INIT.format(count=32) + f"@%p1 mbarrier.expect_tx{order}.shared.b64 [%r10], 48; bar.sync 0;"
    body += f"mbarrier.arrive{order}.shared.b64 %d5, [%r10];"
    body += f"mbarrier.test_wait.parity{order}.shared.b64 %p2, [%r10], 0; selp.u32 %r1, 1, 0, %p2; bar.sync 0;"
    body += f"@%p1 mbarrier.complete_tx{order}.shared.b64 [%r10], 48; bar.sync 0;"
    body += f"mbarrier.try_wait{acquire}.shared.b64 %p3, [%r10], %d5; selp.u32 %r2, 2, 0, %p3; or.b32 %r1, %r1, %r2;"
    body += f"mbarrier.arrive.expect_tx{order}.shared.b64 _, [%r10], 0;"
    body += (
        f"mbarrier.try_wait.parity{acquire}.shared.b64 %p4, [%r10], 1; selp.u32 %r2, 4, 0, %p4; or.b32 %r1, %r1, %r2;"
    )
    body += "bar.sync 0; @%p1 mbarrier.inval.shared.b64 [%r10]; bar.sync 0; @%p1 mbarrier.init.shared.b64 [%r10], 1;"
    assert results(body, BAR) == [6] * 32


@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
def test_arrivals_that_are_fewer_from_the_next_phase_on(space: str) -> None:
    """Lane 31 arrives for the last time, so that 31 lanes complete the second phase; addresses may be generic."""
    address = "[%r10]" if space else "[%d9]"
    body = INIT.format(count=33) + "cvt.u64.u32 %d9, %r10; cvta.shared.u64 %d9, %d9; setp.eq.u32 %p2, %r0, 31;"
    body += f"@%p1 mbarrier.arrive.noComplete{space}.b64 %d5, {address}, 1; bar.sync 0;"
    body += f"@!%p2 mbarrier.arrive{space}.b64 %d6, {address}; bar.sync 0;"
    body += f"@%p2 mbarrier.arrive_drop{space}.b64 %d6, {address};"
    body += f"mbarrier.test_wait{space}.b64 %p3, {address}, %d6; mbarrier.pending_count.b64 %r2, %d6;"
    body += "selp.u32 %r1, 100, 0, %p3; add.u32 %r1, %r1, %r2; bar.sync 0;"
    # Of what is 32 now, lane 0 takes away one more that has not come, and expects bytes of it.
    body += f"@%p1 mbarrier.arrive_drop.expect_tx{space}.b64 _, {address}, 16;"
    body += f"@!%p2 mbarrier.arrive{space}.b64 _, {address};"
    body += f"@%p1 mbarrier.complete_tx{space}.b64 {address}, 16; bar.sync 0;"
    body += f"mbarrier.try_wait.parity{space}.b64 %p4, {address}, 1, 1000;"
    body += "selp.u32 %r2, 1000, 0, %p4; add.u32 %r1, %r1, %r2;"
    found = results(body, BAR)
    assert sorted(found) == [1100 + n for n in range(1, 33)]
    assert found[31] == 1101


def test_the_last_arrival_is_no_incomplete_one() -> None:
    body = INIT.format(count=2) + "@%p1 mbarrier.arrive.noComplete.release.cta.shared.b64 %d5, [%r10], 2;"
    with pytest.raises(EmulatorError, match=r"the last of the arrivals, though \.noComplete says that it is not"):
        results(body, BAR)
    with pytest.raises(EmulatorError, match="3 dropped of 2 expected arrivals"):
        results(INIT.format(count=2) + "@%p1 mbarrier.arrive_drop.shared.b64 %d5, [%r10], 3;", BAR)
    with pytest.raises(EmulatorError, match="still waits for 16 bytes"):
        expect = "@%p1 mbarrier.expect_tx.shared.b64 [%r10], 16;"
        results(INIT.format(count=2) + expect + "@%p1 mbarrier.inval.shared.b64 [%r10];", BAR)


@pytest.mark.parametrize(("count", "threads", "said"), [
    (16, 32, "16 registers are no multiple of 8 from 24 to 256"), (100, 32, "100 registers are no multiple of 8"),
    (232, 512, "the warps of the CTA now have 118784 registers, and a multiprocessor has 65536"),
])  # fmt: skip
def test_registers_that_there_are_not(count: int, threads: int, said: str) -> None:
    with pytest.raises(EmulatorError, match=said):
        launch(kernel(f"setmaxnreg.inc.sync.aligned.u32 {count};"), [0], Memory(), threads=threads)
    launch(kernel("setmaxnreg.inc.sync.aligned.u32 160;"), [0], Memory(), threads=384)


@pytest.mark.parametrize(("suffix", "count"), [(".noinc", 32), ("", 1)])
def test_arrivals_of_copies(suffix: str, count: int) -> None:
    """Each lane's copy arrives for it; without .noinc it counts as one more that is awaited."""
    memory, source = Memory(), RANDOM.integers(0, 1 << 32, 128, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    body = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mad.wide.u32 %d2, %r0, 16, %d0;" + INIT.format(count=count)
    body += "mov.u32 %r2, tile; mad.lo.u32 %r2, %r0, 16, %r2; cp.async.cg.shared.global [%r2], [%d2], 16;"
    body += f"cp.async.mbarrier.arrive{suffix}.shared.b64 [%r10]; bar.warp.sync -1;"
    body += "" if suffix else "@%p1 mbarrier.arrive.shared.b64 %d5, [%r10];"
    body += "AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0; @!%p3 bra AGAIN;"
    body += "mov.u32 %r2, tile; xor.b32 %r3, %r0, 1; mad.lo.u32 %r3, %r3, 16, %r2;"
    body += "ld.shared.u32 %r4, [%r3]; mad.wide.u32 %d3, %r0, 4, %d1; st.global.u32 [%d3], %r4;"
    addresses = [memory.add("source", source), memory.add("out", out)]
    launch(kernel(body, 2, BAR), addresses, memory)
    assert out.tolist() == [source[4 * (n ^ 1)] for n in range(32)]
