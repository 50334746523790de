"""Clusters: ranks, each other's shared memory, barriers that reach other CTAs, and what orders their threads."""

from __future__ import annotations

import re

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(9)
SHARED = ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b8 bar[16];\n"
# %r1 the tile, %r2 the thread's word of it, %r10 the mbarrier; %r11 the rank, %r12 the next one's, %r13 and %r14 its
# word and its mbarrier; %d1 the thread's word of the output; %p1 is thread 0.
SETUP = """
ld.param.u64 %d0, [p0]; mov.u32 %r1, tile; mad.lo.u32 %r2, %r0, 4, %r1; mov.u32 %r10, bar;
mov.u32 %r11, %cluster_ctarank; mov.u32 %r15, %cluster_nctarank; add.u32 %r12, %r11, 1; rem.u32 %r12, %r12, %r15;
mapa.shared::cluster.u32 %r13, %r2, %r12; mapa.shared::cluster.u32 %r14, %r10, %r12;
mov.u32 %r16, %ctaid.x; mov.u32 %r17, %ntid.x; mad.lo.u32 %r16, %r16, %r17, %r0; mad.wide.u32 %d1, %r16, 4, %d0;
setp.eq.u32 %p1, %r0, 0;
"""
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
OUT = "st.global.u32 [%d1], %r9;\n"
WAIT = "W{n}: mbarrier.try_wait.parity{order}.shared.b64 %p3, [%r10], {n}; @!%p3 bra W{n};\n"
FAR_WAIT = WAIT.format(n=0, order=".acquire.cluster")
INIT = "@%p1 mbarrier.init.shared.b64 [%r10], {count}; @%p1 fence.mbarrier_init.release.cluster;\n"
FILL = "add.u32 %r3, %r16, 100; st.shared.u32 [%r2], %r3;\n"


def run(body: str, seed: int = 0, threads: int = 32, size: int = 2, grid: int = 0, **options: int) -> list[list[int]]:
    """%r9 of each thread of each CTA that `body` writes."""
    memory, ctas = Memory(), grid or size
    out = np.zeros((ctas, threads), np.uint32)
    text = kernel(SETUP + body, 1, SHARED)
    launch(text, [memory.add("out", out)], memory, grid=ctas, threads=threads, cluster=size, seed=seed, **options)
    return out.tolist()


def fault(body: str, seed: int = 0, threads: int = 32, size: int = 2, **options: int) -> str:
    with pytest.raises(EmulatorError) as caught:
        run(body, seed, threads, size, **options)
    return str(caught.value)


# ---- where a CTA is -------------------------------------------------------------------------------------------------


def test_ranks_and_places_of_a_grid_of_clusters() -> None:
    names = ["%cluster_ctarank", "%cluster_nctarank"]
    names += [
        f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for axis in "xyz"
    ]
    grid, cluster = (4, 6, 2), (2, 3, 1)
    memory, out = Memory(), np.zeros((2, 6, 4, len(names)), np.uint32)
    body = "ld.param.u64 %d0, [p0]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;"
    body += f"mad.lo.u32 %r2, %r3, 6, %r2; mad.lo.u32 %r1, %r2, 4, %r1; mad.wide.u32 %d0, %r1, {4 * len(names)}, %d0;"
    body += "".join(f"mov.u32 %r4, {name}; st.global.u32 [%d0+{4 * n}], %r4;" for n, name in enumerate(names))
    text = kernel(body).replace("k(.param .u64 p0)\n", "k(.param .u64 p0) .reqntid 1 .reqnctapercluster 2, 3, 1\n")
    assert text.count("reqnctapercluster") == 1
    launch(text, [memory.add("out", out)], memory, grid=grid, threads=1)  # type: ignore[arg-type]
    for z, y, x in np.ndindex(2, 6, 4):
        want = [x % 2 + 2 * (y % 3), 6, x % 2, y % 3, 0, *cluster, x // 2, y // 3, z, 2, 2, 2]
        assert out[z, y, x].tolist() == want


def test_whether_there_are_clusters() -> None:
    body = "mov.pred %p2, %is_explicit_cluster; selp.u32 %r9, 1, 0, %p2;" + OUT
    assert run(body) == [[1] * 32] * 2
    assert run(body, size=1, grid=2) == [[0] * 32] * 2


@pytest.mark.parametrize(("grid", "cluster", "said"), [
    (3, 2, "a grid of 3 x 1 x 1 CTAs is no multiple of the cluster, 2 x 1 x 1"),
    (17, 17, "the limit is 16"), ((8, 8, 1), (8, 4, 1), "a cluster of 8 x 4 x 1 CTAs; the limit is 16"),
    (4, 0, "expected one to three positive sizes"),
])  # fmt: skip
def test_clusters_that_are_refused(grid: int, cluster: int, said: str) -> None:
    with pytest.raises(EmulatorError, match=said):
        launch(kernel(""), [0], Memory(), grid=grid, cluster=cluster)
    demands = kernel("").replace(")\n", ") .reqnctapercluster 4\n", 1)
    with pytest.raises(EmulatorError, match="but the PTX demands 4 x 1 x 1: leave it out"):
        launch(demands, [0], Memory(), grid=4, cluster=2)


# ---- addresses ------------------------------------------------------------------------------------------------------


def test_addresses_name_their_cta() -> None:
    body = """
    mapa.shared::cluster.u32 %r3, %r1, %r11; sub.u32 %r3, %r3, %r1; getctarank.shared::cluster.u32 %r4, %r13;
    cvt.u64.u32 %d5, %r2; cvta.shared.u64 %d5, %d5; mapa.u64 %d6, %d5, %r12; getctarank.u64 %r5, %d6;
    isspacep.shared::cluster %p2, %d6; isspacep.shared::cta %p3, %d6; isspacep.shared %p4, %d5;
    selp.u32 %r6, 1, 0, %p2; selp.u32 %r7, 10, 0, %p3; selp.u32 %r8, 100, 0, %p4;
    mad.lo.u32 %r9, %r3, 1000, %r4; mad.lo.u32 %r9, %r9, 10, %r5; add.u32 %r9, %r9, %r6; add.u32 %r9, %r9, %r7;
    add.u32 %r9, %r9, %r8;
    """
    # Its own address in the cluster is its address; the neighbour's is in the cluster's space and in none of its own.
    found = run(body + OUT, size=4)
    assert found == [[11 * ((rank + 1) % 4) + 101] * 32 for rank in range(4)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("generic", [False, True])
def test_reading_a_neighbour(generic: bool, seed: int) -> None:
    read = "ld.shared::cluster.u32 %r9, [%r13];\n"
    if generic:
        read = "cvt.u64.u32 %d5, %r2; cvta.shared.u64 %d5, %d5; mapa.u64 %d5, %d5, %r12; ld.u32 %r9, [%d5];\n"
    found = run(FILL + MEET + read + MEET + OUT, seed, size=4)
    assert found == [[32 * ((rank + 1) % 4) + n + 100 for n in range(32)] for rank in range(4)]


@pytest.mark.parametrize("seed", range(4))
def test_many_clusters_at_once(seed: int) -> None:
    body = FILL + MEET + "ld.shared::cluster.u32 %r9, [%r13];" + MEET + OUT
    want = [[32 * (cta ^ 1) + n + 100 for n in range(32)] for cta in range(12)]
    assert run(body, seed, grid=12, os_threads=2) == want
    assert run(body, seed, grid=12, resident=5) == want


@pytest.mark.parametrize("seed", range(4))
def test_writing_to_a_neighbour(seed: int) -> None:
    begin = "barrier.cluster.arrive; barrier.cluster.wait;\n"
    body = (
        "add.u32 %r3, %r16, 100;"
        + begin
        + "st.shared::cluster.u32 [%r13], %r3;\n"
        + MEET
        + "ld.shared.u32 %r9, [%r2];\n"
    )
    assert run(body + OUT, seed, size=2) == [[132 + n for n in range(32)], [100 + n for n in range(32)]]


@pytest.mark.parametrize("seed", range(4))
def test_counting_in_one_cta(seed: int) -> None:
    body = "mapa.shared::cluster.u32 %r5, %r1, 0; @%p1 st.shared.u32 [%r1], 7;" + MEET
    body += "red.relaxed.cluster.shared::cluster.add.u32 [%r5], 1;" + MEET
    body += "atom.relaxed.cluster.shared::cluster.or.b32 %r9, [%r5], 0;" + MEET
    assert run(body + OUT, seed, threads=64, size=3) == [[7 + 3 * 64] * 64] * 3


@pytest.mark.parametrize("seed", range(3))
def test_a_flag_of_another_cta(seed: int) -> None:
    """CTA 1 writes its own memory and then a flag in that of CTA 0, which looks at it until it is there."""
    body = "mapa.shared::cluster.u32 %r5, %r10, 0; @%p1 st.shared.u32 [%r10], 0; st.shared.u32 [%r2], 0;" + MEET
    body += "setp.eq.u32 %p2, %r11, 0; @%p2 bra LOOK; st.shared.u32 [%r2], %r16; bar.sync 0;"
    body += "@%p1 st.release.cluster.shared::cluster.u32 [%r5], 1; bra DONE;"
    body += "LOOK: ld.acquire.cluster.shared::cluster.u32 %r4, [%r10]; setp.eq.u32 %p3, %r4, 0; @%p3 bra LOOK;"
    body += "ld.shared::cluster.u32 %r9, [%r13]; DONE:" + MEET + OUT
    assert run(body, seed)[0] == list(range(32, 64))
    for weak in ("st.relaxed.cluster", "st.release.cta", "ld.relaxed.cluster", "ld.acquire.cta"):
        kind = weak[:3]
        found = fault(body.replace(f"{kind}release.cluster", weak).replace(f"{kind}acquire.cluster", weak), seed)
        assert "race: " in found


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "said"), [
    ("mapa.shared::cluster.u32 %r3, %r1, 2;", "mapa: rank 2, the cluster has 2 CTAs"),
    ("mov.u64 %d5, 5000; mapa.u64 %d5, %d5, 1;", "mapa: 0x1388 is no address in shared memory"),
    (FILL + MEET + "ld.shared.u32 %r9, [%r13];", "this instruction reaches the shared memory of its own CTA only"),
    (MEET + "ld.shared::cluster.u32 %r9, [%r13];", "not written before"),
    (MEET + "st.shared::cluster.u32 [%r13+1024], %r0;", "shared byte 1040: the CTA has 1040"),
    (MEET + "add.u32 %r3, %r13, 33554432; st.shared::cluster.u32 [%r3], %r0;", "the cluster has 2 CTAs"),
    ("st.shared::cluster.u32 [%r13], %r0;", "nothing has told this thread that the CTA has started"),
    ("barrier.cluster.wait;", "barrier.cluster.wait: lanes 0xffffffff have not arrived"),
    ("barrier.cluster.arrive; barrier.cluster.arrive;", "have arrived before and not waited since"),
    (INIT.format(count=1) + MEET + "@%p1 mbarrier.try_wait.parity.shared.b64 %p2, [%r14], 0;",
     "mbarrier wait: shared address"),
    (INIT.format(count=1) + MEET + "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r14];",
     "reaches the shared memory of its own"),
])  # fmt: skip
def test_faults_are_named(body: str, said: str) -> None:
    found = fault(body)
    assert said in found
    assert re.search(r"PTX line \d+", found)


def test_the_shared_memory_of_a_cta_that_has_ended() -> None:
    body = FILL + MEET + "setp.eq.u32 %p2, %r11, 0; @%p2 bra READ; ret; READ: ld.shared::cluster.u32 %r9, [%r13];"
    found = fault(body.replace("READ: ld", "READ: nanosleep.u32 20; nanosleep.u32 20; ld"))
    assert "is one of rank 1, CTA (1, 0, 0), which has ended" in found
    # Whether it has ended by then is a matter of luck, and nobody relies on that.
    for seed in range(4):
        with pytest.raises(
            EmulatorError, match=r"which has ended|ends while CTA \(0, 0, 0\) warp 0, lane \d+ may still"
        ):
            run(body, seed)
    run(body.replace("@%p2 bra READ; ret; READ:", "@!%p2 bra DONE;") + "DONE:" + MEET)


def test_a_missing_cta_at_the_cluster_barrier_is_a_deadlock() -> None:
    found = fault("setp.eq.u32 %p2, %r11, 0; @%p2 bra SKIP;" + MEET + "SKIP: bar.sync 1, 64;")
    assert "deadlock in CTA (0, 0, 0)" in found
    assert "warp 0, lanes 0xffffffff: at barrier 1, 32 threads have arrived of 64" in found
    assert "at the cluster's barrier, which waits for 32 threads of CTA (0, 0, 0), PTX line" in found


def test_a_cta_that_waits_for_one_that_has_ended_is_a_deadlock() -> None:
    body = INIT.format(count=1) + MEET + "setp.eq.u32 %p2, %r11, 1; @%p2 ret;" + FAR_WAIT
    found = fault(body)
    assert "deadlock in CTA (0, 0, 0)" in found
    assert "wait for parity 0 of the mbarrier at shared byte 1024 (1 of 1 arrivals and 0 bytes are missing" in found
    assert "CTA (1, 0, 0)" not in found


@pytest.mark.parametrize("seed", range(4))
def test_what_reaches_a_cta_has_to_be_over_when_it_ends(seed: int) -> None:
    """CTA 1 reaches CTA 0, and nothing but what it does there tells that it has."""
    body = INIT.format(count=1) + MEET + "setp.eq.u32 %p2, %r11, 1; and.pred %p2, %p1, %p2; setp.eq.u32 %p4, %r11, 0;"
    arrive = body + "@%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14];"
    store = (
        body + "@!%p2 bra SENT; st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r13], %r0, [%r14]; SENT:"
    )
    store += "@!%p4 ret; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 4;"
    run(arrive + "@!%p4 ret;" + FAR_WAIT, seed)
    run(store + FAR_WAIT, seed)
    for text in (arrive, store):
        with pytest.raises(
            EmulatorError, match=r"CTA \(0, 0, 0\) ends (while|though)|which has ended|on the way|never came"
        ):
            run(text, seed)


def test_threads_that_have_exited_are_not_waited_for() -> None:
    run("setp.gt.u32 %p2, %r0, 30; @%p2 ret; barrier.cluster.arrive; barrier.cluster.wait;", threads=64)
    run("setp.eq.u32 %p2, %r11, 0; @%p2 ret;" + MEET)


# ---- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_what_orders_ctas(seed: int) -> None:
    read = "ld.shared::cluster.u32 %r9, [%r13];\n" + MEET + OUT
    # All has been written before, so that only the order is at fault.
    begin = "st.shared.u32 [%r2], 5;" + MEET + FILL
    run(begin + MEET + read, seed)
    relaxed = MEET.replace("release.aligned", "relaxed.aligned")
    for order in ("", "bar.sync 0;", "fence.acq_rel.cluster;", relaxed, MEET.replace(".release", ".relaxed")):
        assert re.search(r"race: (read|write) of shared bytes \d+ to \d+", fault(begin + order + read, seed))
    run(begin + "fence.acq_rel.cluster;" + relaxed.replace(".aligned", "") + read, seed)
    assert "race" in fault(begin + "fence.acq_rel.cta;" + relaxed + read, seed)


def test_a_race_names_the_cta_whose_memory_it_is() -> None:
    found = fault(FILL + MEET + "st.shared.u32 [%r2], 0; ld.shared::cluster.u32 %r9, [%r13];" + MEET)
    place = (
        r"race: read of shared bytes \d+ to \d+ of CTA \((\d), 0, 0\), which CTA \(\1, 0, 0\) warp 0, lane \d+ writes"
    )
    assert re.search(place, found) or re.search(r"race: write of shared bytes \d+ to \d+, which CTA", found)


ARRIVE = "mbarrier.arrive{order}.shared::cluster.b64 _, [%r14]{count};\n"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", ["", ", 2"])
def test_arrivals_at_a_neighbour_order_what_was_written(count: str, seed: int) -> None:
    init = INIT.format(count=64 if count else 32) + "st.shared.u32 [%r2], 5;" + MEET
    body = init + "st.shared::cluster.u32 [%r13], %r0;" + ARRIVE + "{wait}" + "ld.shared.u32 %r9, [%r2];" + MEET + OUT
    release = body.format(order=".release.cluster", count=count, wait=FAR_WAIT)
    assert run(release, seed) == [list(range(32))] * 2
    for order, wait in ((".relaxed.cluster", ".acquire.cluster"), ("", ".acquire.cluster"), (".release.cluster", "")):
        found = fault(body.format(order=order, count=count, wait=WAIT.format(n=0, order=wait)), seed)
        assert "race: read of shared bytes" in found


def test_a_barrier_of_a_neighbour_has_to_be_known() -> None:
    begin = (
        INIT.format(count=1) + "bar.sync 0; @%p1 barrier.cluster.arrive.relaxed; @!%p1 barrier.cluster.arrive.relaxed;"
    )
    begin += "barrier.cluster.wait;"
    body = begin + "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14];" + FAR_WAIT + MEET
    run(body)
    found = fault(body.replace("@%p1 fence.mbarrier_init.release.cluster;", ""))
    assert re.search(r"race: mbarrier.arrive of the mbarrier at shared byte 1024, which CTA \(\d, 0, 0\) warp 0", found)


@pytest.mark.parametrize("seed", range(3))
def test_expected_bytes_at_a_neighbour(seed: int) -> None:
    body = INIT.format(count=1) + MEET
    body += "@%p1 mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r14], 16;"
    body += "@%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r14], 32;"
    body += "@%p1 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r14], 48;"
    run(body + FAR_WAIT + MEET, seed)


# ---- asynchronous stores and copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("vector", "kind"), [("", "b32"), (".v2", "s32"), (".v4", "f32"), ("", "u64"), (".v2", "b64")])
def test_stores_that_complete_on_a_barrier(vector: str, kind: str, seed: int) -> None:
    count, size = int(vector[2:] or 1), int(kind[1:]) // 8
    bytes_ = 8 * size * count
    registers = [f"%r{20 + n}" if size == 4 else f"%d{20 + n}" for n in range(count)]
    values = "{" + ", ".join(registers) + "}" if vector else registers[0]
    body = INIT.format(count=1) + MEET + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {bytes_};"
    body += (
        f"setp.lt.u32 %p2, %r0, 8; mad.lo.u32 %r3, %r0, {size * count}, %r1; mapa.shared::cluster.u32 %r3, %r3, %r12;"
    )
    for n, register in enumerate(registers):
        body += (
            f"mad.lo.u32 %r20, %r16, {count}, {n + 1};"
            if size == 8
            else f"mad.lo.u32 {register}, %r16, {count}, {n + 1};"
        )
        body += f"cvt.u64.u32 {register}, %r20;" if size == 8 else ""
    store = f"@%p2 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.{kind} [%r3], {values}, [%r14];"
    words = bytes_ // 4
    end = f"mov.u32 %r9, 0; setp.lt.u32 %p4, %r0, {words}; @%p4 ld.shared.u32 %r9, [%r2];" + MEET + OUT
    found = run(body + store + FAR_WAIT + end, seed)
    for rank in range(2):
        sent = [count * (32 * (1 - rank) + n) + k + 1 for n in range(8) for k in range(count)]
        want = sent if size == 4 else [word for value in sent for word in (value, 0)]
        assert found[rank] == [*want, *[0] * 32][:32]
    assert re.search(r"had copied asynchronously|not been waited for", fault(body + store + end, seed))
    assert "a misaligned address" in fault(body + store.replace("[%r3]", "[%r3+2]") + FAR_WAIT + MEET, seed)
    apart = body + store.replace("[%r14]", "[%r10]") + FAR_WAIT + MEET
    assert "the destination and the mbarrier lie in different CTAs" in fault(apart, seed)


REDUCED = {"add": 5 + 64 + 32, "min": 5, "max": 64, "inc": 0, "dec": 4, "and": 0, "or": 69, "xor": 5}


@pytest.mark.parametrize(("operation", "kind"), [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "u32"), ("max", "s32"), ("inc", "u32"), ("dec", "u32"),
    ("and", "b32"), ("or", "b32"), ("xor", "b32"),
])  # fmt: skip
def test_reductions_that_complete_on_a_barrier(operation: str, kind: str) -> None:
    """Thread 0 of either CTA of the neighbours of CTA 0, which is both, adds to a word of it."""
    size = int(kind[1:]) // 8
    value = "%d5" if size == 8 else "%r3"
    body = "mapa.shared::cluster.u32 %r5, %r1, 0; mapa.shared::cluster.u32 %r6, %r10, 0;" + INIT.format(count=1)
    body += "mov.u64 %d4, 5; @%p1 st.shared.b64 [%r1], %d4;" + MEET
    body += "setp.eq.u32 %p2, %r11, 0; and.pred %p2, %p1, %p2;"
    body += f"@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {2 * size};"
    body += "selp.u32 %r3, 64, 32, %p2; cvt.u64.u32 %d5, %r3;"
    body += "@%p1 red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
    body += f".{operation}.{kind} [%r5], {value}, [%r6];"
    body += "setp.ne.u32 %p4, %r11, 0; @%p4 bra DONE;" + FAR_WAIT + "ld.shared.u32 %r9, [%r1]; DONE:" + MEET
    want = {
        "add": 101,
        "min": 5,
        "max": 64,
        "inc": 7,
        "dec": 3,
        "and": 5 & 64 & 32,
        "or": 5 | 64 | 32,
        "xor": 5 ^ 64 ^ 32,
    }
    for seed in range(3):
        assert run(body + OUT, seed)[0] == [want[operation]] * 32


EXCHANGE = (
    "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13+256], [%r1], 128, [%r14];\n"
)
ANNOUNCE = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 128;\n"
SEND = INIT.format(count=1) + FILL + "fence.proxy.async;" + MEET + ANNOUNCE + EXCHANGE


@pytest.mark.parametrize("seed", range(4))
def test_copies_from_one_cta_to_another(seed: int) -> None:
    end = "ld.shared.u32 %r9, [%r2+256];" + MEET + OUT
    assert run(SEND + FAR_WAIT + end, seed) == [list(range(132, 164)), list(range(100, 132))]
    assert "proxy: a bulk copy from shared bytes 0 to 127" in fault(SEND.replace("fence.proxy.async;", "") + end, seed)
    assert re.search(r"had copied asynchronously|not been waited for", fault(SEND + end, seed))
    # The source may be overwritten once the other CTA has got it and says so.
    again = "st.shared.u32 [%r2], 1;" + MEET + OUT
    run(SEND + FAR_WAIT + MEET + again, seed)
    assert "had copied asynchronously and reads" in fault(SEND + FAR_WAIT + again, seed)
    wrong = SEND.replace("[%r14]", "[%r10]") + FAR_WAIT
    assert "the destination and the mbarrier lie in different CTAs" in fault(wrong + MEET, seed)


@pytest.mark.parametrize(("operation", "kind"), [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("inc", "u32"), ("dec", "u32"), ("min", "s32"), ("max", "u32"),
    ("and", "b32"), ("or", "b32"), ("xor", "b32"),
])  # fmt: skip
def test_reductions_into_another_cta(operation: str, kind: str) -> None:
    exchange = EXCHANGE.replace("cp.async", "cp.reduce.async").replace("::bytes", f"::bytes.{operation}.{kind}")
    body = SEND.replace(EXCHANGE, exchange).replace("fence.proxy", "st.shared.u32 [%r2+256], 9; fence.proxy")
    found = run(body + FAR_WAIT + "ld.shared.u32 %r9, [%r2+256];" + MEET + OUT)
    of = {"add": lambda a: a + 9, "inc": lambda a: 10, "dec": lambda a: 8, "min": lambda a: min(a, 9)}
    of |= {"max": lambda a: max(a, 9), "and": lambda a: a & 9, "or": lambda a: a | 9, "xor": lambda a: a ^ 9}
    assert found == [[of[operation](n) for n in range(first, first + 32)] for first in (132, 100)]


MULTICAST = (
    "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d0], 128, "
)
MULTICAST += "[%r10], %h1;\n"


@pytest.mark.parametrize("seed", range(4))
def test_a_multicast(seed: int) -> None:
    memory, source, out = Memory(), np.arange(500, 532, dtype=np.uint32), np.zeros((3, 32), np.uint32)
    body = (
        INIT.format(count=1)
        + MEET
        + "setp.eq.u32 %p2, %r11, 1; and.pred %p2, %p1, %p2; mov.u16 %h1, {ranks};"
        + ANNOUNCE
    )
    body += MULTICAST + WAIT.format(n=0, order="") + "ld.shared.u32 %r9, [%r2]; ld.param.u64 %d2, [p1];"
    body += "mad.wide.u32 %d2, %r16, 4, %d2; st.global.u32 [%d2], %r9;" + MEET
    addresses = [memory.add("source", source), memory.add("out", out)]

    def go(text: str) -> None:
        launch(kernel(SETUP + text, 2, SHARED), addresses, memory, grid=3, cluster=3, seed=seed)

    go(body.format(ranks=7))
    assert out.tolist() == [source.tolist()] * 3
    with pytest.raises(EmulatorError, match=r"deadlock[\s\S]*0 of 1 arrivals and 128 bytes are missing"):
        go(body.format(ranks=3))
    with pytest.raises(EmulatorError, match="a multicast to the ranks 0x9 of a cluster of 3 CTAs"):
        go(body.format(ranks=9))
    with pytest.raises(EmulatorError, match="a multicast to the ranks 0 of"):
        go(body.format(ranks=0))
    with pytest.raises(EmulatorError, match=r"race: cp\.async\.bulk of the mbarrier|no mbarrier was initialised"):
        go(body.format(ranks=7).replace(MEET, "bar.sync 0;", 1))
