"""How long the machine takes, in CPU time of this process, with room for a slower and busier one than was measured.

Loops of many equal instructions in one warp; the time of the loop itself and of the launch goes off. And whole calls,
with and without the checks for races.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import warpgroup_attention
from micro import kernel, launch
from warpgroup import THREADS, Product, in_memory, inputs_of

import dsagen
from dsagen.emulator import Memory

# Room over what is asked for on the machine of the README.
ROOM = 4
ROUNDS, COPIES = 400, 50
MMA = "{%r10, %r11, %r12, %r13}, {%r14, %r15, %r16, %r17}, {%r18, %r19}, {%r10, %r11, %r12, %r13};"
FILL = "mov.u32 %r1, tile; mad.lo.u32 %r2, %r0, 16, %r1; mov.b32 %r20, 0;"
FILL += "st.shared.v4.b32 [%r2], {%r20, %r20, %r20, %r20};"
TILE = ".shared .align 16 .b8 tile[512];\n"


def seconds(body: str, *, races: bool) -> float:
    """CPU time of one launch, the least of some."""
    zero = " ".join(f"mov.b32 %r{n}, 0;" for n in range(10, 20)) + "mov.u64 %d10, 0; mov.u64 %d11, 1;"
    text = kernel(
        f"{TILE}{FILL}{zero} bar.sync 0; mov.u32 %r90, 0;\nLOOP:\n{body}\nadd.u32 %r90, %r90, 1; "
        f"setp.lt.u32 %p1, %r90, {ROUNDS};\n@%p1 bra LOOP;"
    )
    memory = Memory()
    address = memory.add("nothing", np.zeros(32, np.uint32))
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        launch(text, [address], memory, races=races)
        best = min(best, time.process_time() - start)
    return best


def nanoseconds(instruction: str, *, races: bool = False) -> float:
    """Of one instruction of a full warp."""
    launch(kernel("ret;"), [0], Memory())
    return (seconds(instruction * COPIES, races=races) - seconds("", races=races)) / (ROUNDS * COPIES) * 1e9


@pytest.mark.parametrize(("instruction", "most"), [
    ("add.s32 %r10, %r11, %r12;", 8), ("xor.b32 %r10, %r11, %r12;", 8), ("mad.lo.s32 %r10, %r11, %r12, %r13;", 8),
    ("fma.rn.f32 %r10, %r11, %r12, %r13;", 8), ("setp.lt.s32 %p2, %r10, %r11;", 12),
    ("selp.b32 %r10, %r11, %r12, %p2;", 12),
    ("add.s64 %d10, %d10, %d11;", 12), ("ex2.approx.ftz.f32 %r10, %r11;", 30),
    ("cvt.rn.bf16x2.f32 %r10, %r11, %r12;", 20), ("shfl.sync.bfly.b32 %r10, %r11, 1, 31, 0xffffffff;", 120),
    (f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {MMA}", 300),
    (f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {MMA}", 300),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];", 400),
    ("ld.shared.b32 %r10, [%r2];", 300), ("st.shared.b32 [%r2], %r10;", 300),
], ids=lambda value: value.split()[0] if isinstance(value, str) else "")  # fmt: skip
def test_an_instruction(instruction: str, most: float) -> None:
    assert nanoseconds(instruction) <= ROOM * most


# Microseconds of a product of a warpgroup that are asked for on one core with AVX-512, and what other ones take.
PRODUCTS = {Product(columns=256): 15.0, Product(columns=256, a=None): 15.0, Product("f32", "e4m3", "e4m3", 256): 150.0}
PRODUCT_ROUNDS = 50


def microseconds(form: Product, *, races: bool) -> float:
    """Of one product among four in a group."""
    text = form.text()
    mark = re.search(r"wgmma\.mma_async[^;]*;", text)
    assert mark is not None
    group = f"{mark[0]} {mark[0]} {mark[0]} {mark[0]} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    times = {}
    for body in ("", group):
        loop = f"mov.u32 %r90, 0;\nLOOP: {body} add.u32 %r90, %r90, 1; setp.lt.u32 %p1, %r90, {PRODUCT_ROUNDS};\n"
        looped = text.replace(mark[0], f"{loop}@%p1 bra LOOP; {mark[0]}")
        addresses, memory, _ = in_memory(form, inputs_of(form))
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            launch(looped, addresses, memory, threads=THREADS, races=races)
            best = min(best, time.process_time() - start)
        times[body] = best
    return (times[group] - times[""]) / (4 * PRODUCT_ROUNDS) * 1e6


@pytest.mark.parametrize("form", PRODUCTS, ids=str)
def test_a_product_of_a_warpgroup(form: Product) -> None:
    assert microseconds(form, races=False) <= ROOM * PRODUCTS[form]


# How many times as long a call may take with the checks for races: two are asked for.
MOST_TIMES = 2
ROOM_OF_TIMES = 1.6


def attention(name: str, races: bool) -> Callable[[], object]:
    kernels = dsagen.load(name, device="emulator", emulator=dsagen.EmulatorOptions(races=races, threads=1))
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 1, kernels.spec.heads, 576, generator=generator).to(torch.bfloat16)
    pool = torch.zeros(40, 64, 1, 656, dtype=torch.uint8)
    indices = torch.randint(0, 40 * 64, (1, 1, 1024), generator=generator, dtype=torch.int32)
    return lambda: kernels.sparse_decode(q, pool, indices)


def selection(name: str, races: bool, rows: int, width: int) -> Callable[[], object]:
    kernels = dsagen.load(name, device="emulator", emulator=dsagen.EmulatorOptions(races=races, threads=1))
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
    return lambda: kernels.topk(scores, k=512)


def by_warpgroups(races: bool) -> Callable[[], object]:
    inputs = warpgroup_attention.inputs_of(1, 2048)
    return lambda: warpgroup_attention.run(inputs, races=races)


BY_WARPGROUPS = "attention of 64 heads by warpgroups"
# Milliseconds that are asked for of its one CTA, without and with checks.
MOST_MILLISECONDS = (25.0, 60.0)
WHOLE: dict[str, Callable[[bool], Callable[[], object]]] = {
    BY_WARPGROUPS: by_warpgroups,
    "attention of 16 heads": lambda races: attention("v32_h16", races),
    "attention of 128 heads": lambda races: attention("v32_h128", races),
    "a row a block": lambda races: selection("v32_topk_h128", races, 4, 20_000),
    "a row for many blocks": lambda races: selection("v32_topk_h128", races, 1, 140_000),
}


def times_as_long(of: str) -> tuple[float, float]:
    """CPU time of a call without and with checks, the least of some that take turns."""
    calls = {races: WHOLE[of](races) for races in (False, True)}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(5):
        for races, call in calls.items():
            start = time.process_time()
            call()
            best[races] = min(best[races], time.process_time() - start)
    return best[False], best[True]


@pytest.mark.compile
@pytest.mark.parametrize("of", WHOLE)
def test_checks_of_a_whole_call(of: str) -> None:
    plain, checked = times_as_long(of)
    assert checked <= MOST_TIMES * ROOM_OF_TIMES * plain
    if of == BY_WARPGROUPS:
        assert all(1e3 * time <= ROOM * most for time, most in zip((plain, checked), MOST_MILLISECONDS, strict=True))


if __name__ == "__main__":
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    for mark in test_an_instruction.pytestmark:  # type: ignore[attr-defined]
        for text, limit in mark.args[1]:
            if only and only not in text:
                continue
            plain, checked = nanoseconds(text), nanoseconds(text, races=True)
            print(f"{text.split()[0]:<52}{plain:8.1f} ns{checked:8.1f} ns with checks{limit:6} asked for")
    for form, limit in PRODUCTS.items():
        if only and only not in f"wgmma {form}":
            continue
        plain, checked = microseconds(form, races=False), microseconds(form, races=True)
        print(f"wgmma {form!s:<46}{plain:8.1f} us{checked:8.1f} us with checks{limit:6} asked for")
    for of in (of for of in WHOLE if only in of):
        plain, checked = times_as_long(of)
        print(f"{of:<52}{1e3 * plain:8.1f} ms{1e3 * checked:8.1f} ms with checks{checked / plain:6.2f} times as long")
