"""Two hand-written pipelines of clusters, and each with one barrier, fence, wait or arrival fewer, or a weaker one.

A ring that tensor copies fill, of which either CTA of a pair loads a half for both, feeding two warps each; and an
exchange of rows between shared memories, by bulk copies and asynchronous stores, whose result a bulk copy stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from micro import kernel, launch
from mutants import changed_texts

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError
from dsagen.tensor_map import TensorMap

MEET = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
TILES, STAGES, ROWS = 7, 2, 4
RING = f"""
.shared .align 128 .b8 ring[{STAGES * 1024}];
.shared .align 8 .b8 bars[{STAGES * 16}];
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, ring; mov.u32 %r2, bars; mov.u32 %r3, %cluster_ctarank;
sub.u32 %r4, 1, %r3; shr.u32 %r5, %r0, 5; and.b32 %r6, %r0, 31;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.init.shared::cta.b64 [%r2+8], 1;
mbarrier.init.shared::cta.b64 [%r2+16], 4;
mbarrier.init.shared::cta.b64 [%r2+24], 4;
fence.mbarrier_init.release.cluster;
READY:
{MEET}
mov.u32 %r10, 0; mov.u32 %r21, 0;
setp.ne.u32 %p2, %r5, 0; @%p2 bra CONSUME;
setp.ne.u32 %p3, %r6, 0; @%p3 bra DONE;
mov.u16 %h1, 3;
PRODUCE:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r13, %r12, 1;
mad.lo.u32 %r14, %r11, 8, %r2;
EMPTY:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r14+16], %r13;
@!%p4 bra EMPTY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r14], 1024;
mad.lo.u32 %r15, %r11, 1024, %r1; mad.lo.u32 %r15, %r3, 512, %r15;
mad.lo.u32 %r16, %r10, 2, %r3; mul.lo.u32 %r16, %r16, {ROWS};
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
  [%r15], [%d0, {{0, %r16}}], [%r14], %h1;
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {TILES}; @%p5 bra PRODUCE;
bra DONE;
CONSUME:
mapa.shared::cluster.u32 %r20, %r2, %r4;
NEXT:
and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
mad.lo.u32 %r14, %r11, 8, %r2; mad.lo.u32 %r17, %r11, 8, %r20;
FULL:
mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r14], %r12;
@!%p6 bra FULL;
mad.lo.u32 %r15, %r11, 1024, %r1; mad.lo.u32 %r15, %r6, 4, %r15;
{"".join(f"ld.shared.u32 %r22, [%r15+{128 * row}]; mad.lo.u32 %r21, %r21, 3, %r22;" for row in range(2 * ROWS))}
bar.warp.sync -1;
setp.ne.u32 %p7, %r6, 0;
@!%p7 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r14+16];
@!%p7 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r17+16];
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {TILES}; @%p5 bra NEXT;
mov.u32 %r18, %ctaid.x; mad.lo.u32 %r18, %r18, 2, %r5; sub.u32 %r18, %r18, 1; mad.lo.u32 %r18, %r18, 32, %r6;
mad.wide.u32 %d1, %r18, 4, %d1; st.global.u32 [%d1], %r21;
DONE:
{MEET}
"""

TURNS = 3
EXCHANGE = f"""
.shared .align 128 .b8 send[256];
.shared .align 128 .b8 got[256];
.shared .align 128 .b8 mail[256];
.shared .align 8 .b8 bars[24];
ld.param.u64 %d0, [p0]; mov.u32 %r1, send; mov.u32 %r2, bars; mov.u32 %r3, %cluster_ctarank; sub.u32 %r4, 1, %r3;
mad.lo.u32 %r5, %r0, 4, %r1; and.b32 %r6, %r0, 31; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r9, %r7, 64, %r0;
mov.u32 %r30, got; mov.u32 %r31, mail; mad.lo.u32 %r32, %r0, 4, %r30; mad.lo.u32 %r33, %r0, 4, %r31;
mapa.shared::cluster.u32 %r20, %r2, %r4; mapa.shared::cluster.u32 %r21, %r30, %r4;
mapa.shared::cluster.u32 %r22, %r33, %r4;
setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.init.shared::cta.b64 [%r2+8], 2;
mbarrier.init.shared::cta.b64 [%r2+16], 1;
fence.mbarrier_init.release.cluster;
READY:
{MEET}
@!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+16], 256;
mov.u32 %r10, 0;
TURN:
and.b32 %r11, %r10, 1; xor.b32 %r12, %r11, 1;
FREE:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2+8], %r12;
@!%p2 bra FREE;
st.shared.u32 [%r5], %r9;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra SENT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r21], [%r1], 256, [%r20];
SENT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r2], %r11;
@!%p3 bra SENT;
ld.shared.u32 %r13, [%r32]; mad.lo.u32 %r9, %r9, 2, %r13;
bar.warp.sync -1;
setp.ne.u32 %p4, %r6, 0;
@!%p4 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r20+8];
add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {TURNS}; @%p5 bra TURN;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r22], %r9, [%r20+16];
MAIL:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p6, [%r2+16], 0;
@!%p6 bra MAIL;
xor.b32 %r14, %r33, 128; ld.shared.u32 %r13, [%r14]; add.u32 %r9, %r9, %r13;
LAST:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2+8], {(TURNS + 1) % 2};
@!%p2 bra LAST;
st.shared.u32 [%r5], %r9;
fence.proxy.async.shared::cta;
bar.sync 1;
@%p1 bra DONE;
mad.wide.u32 %d1, %r7, 256, %d0;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
DONE:
{MEET}
"""

Run = Callable[[str, int], bool]


def ring(text: str, seed: int) -> bool:
    """Whether the sums of two clusters are right."""
    memory, rows = Memory(), TILES * 2 * ROWS
    tensor = np.random.default_rng(3).integers(0, 1 << 20, (rows, 32)).astype(np.uint32)
    tensor_map = TensorMap("uint32", memory.add("tensor", tensor, writable=False), (32, rows), (128,), (32, ROWS))
    raw, out = np.frombuffer(tensor_map.encode_for_emulator(), np.uint8).copy(), np.zeros((4, 2, 32), np.uint32)
    addresses = [memory.add("map", raw, writable=False), memory.add("out", out)]
    launch(text, addresses, memory, grid=4, cluster=2, threads=96, seed=seed, instruction_limit=200_000)
    want = np.zeros(32, np.uint32)
    for row in tensor:
        want = want * np.uint32(3) + row
    return bool((out == want).all())


def exchange(text: str, seed: int) -> bool:
    """Whether the rows of one cluster are right."""
    memory, out = Memory(), np.zeros((2, 64), np.uint32)
    launch(text, [memory.add("out", out)], memory, grid=2, cluster=2, threads=64, seed=seed, instruction_limit=200_000)
    want = np.arange(128, dtype=np.uint32).reshape(2, 64)
    for _ in range(TURNS):
        want = 2 * want + want[::-1]
    return bool((out == want + np.roll(want[::-1], 32, axis=1)).all())


PIPELINES: dict[str, tuple[str, Run]] = {"ring": (kernel(RING, 2), ring), "exchange": (kernel(EXCHANGE), exchange)}
# What makes no difference, by pipeline, change, instruction and which of those it is, with the reason.
_NOTHING = "the thread has done nothing of which those who wait need to know"
_FENCED = "there are mbarriers to tell of only, and those were fenced"
_WAITED = "each CTA has waited for all that comes to it before it ends"
_EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _"
EQUIVALENT: dict[tuple[str, str, str, int], str] = {
    ("ring", "relaxed", "barrier.cluster.arrive.release.aligned;", 0): _FENCED,
    ("exchange", "relaxed", "barrier.cluster.arrive.release.aligned;", 0): _FENCED,
    ("ring", "relaxed", f"{_EXPECT}, [%r14], 1024;", 0): _NOTHING,
    ("exchange", "relaxed", f"{_EXPECT}, [%r2+16], 256;", 0): _NOTHING,
    ("exchange", "relaxed", f"{_EXPECT}, [%r2], 256;", 0): _NOTHING,
    ("exchange", "removed", "fence.mbarrier_init.release.cluster;", 0): "a fence.proxy.async comes before every copy",
    ("exchange", "relaxed", "barrier.cluster.arrive.release.aligned;", 1): _WAITED,
    ("exchange", "removed", "barrier.cluster.wait.acquire.aligned;", 1): _WAITED,
}


def is_noticed(run: Run, text: str, seeds: range) -> bool:
    for seed in seeds:
        try:
            if not run(text, seed):
                return True
        except EmulatorError:
            return True
    return False


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipelines_are_right_in_every_order(name: str) -> None:
    text, run = PIPELINES[name]
    assert all(run(text, seed) for seed in range(20))


@pytest.mark.parametrize("name", PIPELINES)
def test_every_mutant_is_noticed(name: str) -> None:
    text, run = PIPELINES[name]
    found = list(changed_texts(text))
    assert len(found) >= 25
    missed, known, copies = [], set(), Counter[tuple[str, str]]()
    for mutant in found:
        key = (name, mutant.change, mutant.instruction, copies[mutant.change, mutant.instruction])
        copies[mutant.change, mutant.instruction] += 1
        if is_noticed(run, mutant.ptx, range(4)):
            continue
        known.add(key)
        if key not in EQUIVALENT:
            line = text.count("\n", 0, mutant.at) + 1
            missed.append(f"{mutant.change} {mutant.instruction} at line {line}")
    assert missed == []
    assert {key for key in EQUIVALENT if key[0] == name} == known
