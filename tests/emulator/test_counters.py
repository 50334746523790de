"""Counters of a launch: each against what the rule says for accesses that can be reckoned by hand."""

from __future__ import annotations

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.emulator.counters import METRICS, Counters, class_of, total
from dsagen.emulator.library import load_library

SHARED = ".shared .align 128 .b8 area[16384];\n"


def counters(body: str, declarations: str = "", seed: int = 0, threads: int = 32, cluster: int = 1) -> Counters:
    """What a CTA, or a cluster, does; %d0 is the address of 64 KiB of global memory at a multiple of 1 MiB."""
    memory = Memory()
    address = memory.add("data", np.zeros(1 << 16, np.uint8))
    text = kernel(f"ld.param.u64 %d0, [p0];\n{body}", 1, declarations)
    options = {"counters": True, "seed": seed, "threads": threads, "grid": cluster, "cluster": cluster}
    found = launch(text, [address], memory, **options).measured
    assert found is not None
    return found


def at(stride: int, offset: int = 0) -> str:
    """%d1 becomes data + offset + stride x thread."""
    return f"mad.wide.u32 %d1, %r0, {stride}, %d0;\nadd.u64 %d1, %d1, {offset};\n"


@pytest.mark.parametrize(
    ("stride", "offset", "instruction", "lane_bytes", "sectors"),
    [
        (4, 0, "ld.global.u32 %r1, [%d1];", 4, 4),
        (4, 4, "ld.global.u32 %r1, [%d1];", 4, 5),
        (0, 0, "ld.global.u32 %r1, [%d1];", 4, 1),
        (32, 0, "ld.global.u8 %h1, [%d1];", 1, 32),
        (1, 0, "ld.global.u8 %h1, [%d1];", 1, 1),
        (8, 0, "ld.global.v2.u32 {%r1, %r2}, [%d1];", 8, 8),
        (16, 0, "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];", 16, 16),
        (128, 16, "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];", 16, 32),
        (16, 0, "ld.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];", 16, 16),
    ],
)
def test_sectors_of_a_request(stride: int, offset: int, instruction: str, lane_bytes: int, sectors: int) -> None:
    found = counters(at(stride, offset) + instruction)
    assert (found.global_read_bytes, found.global_read_sectors) == (32 * lane_bytes, sectors)
    assert (found.global_written_bytes, found.shared_read_wavefronts) == (0, 0)


def test_a_guarded_request_counts_its_lanes() -> None:
    found = counters(at(4) + "setp.lt.u32 %p1, %r0, 9;\n@%p1 st.global.u32 [%d1], %r0;")
    assert (found.global_written_bytes, found.global_written_sectors) == (36, 2)
    # Guarded off for all, it is an instruction that moves nothing.
    found = counters(at(4) + "setp.lt.u32 %p1, %r0, 0;\n@%p1 st.global.u32 [%d1], %r0;")
    assert (found.global_written_bytes, found.instructions["st.global"]) == (0, 1)


def test_an_atomic_reads_and_writes() -> None:
    found = counters(at(0) + "red.global.add.u32 [%d1], 1;")
    assert (found.global_read_sectors, found.global_written_sectors) == (1, 1)
    assert (found.global_read_bytes, found.global_written_bytes) == (128, 128)


@pytest.mark.parametrize(
    ("stride", "instruction", "wavefronts", "conflicts"),
    [
        (4, "st.shared.u32 [%r1], %r0;", 1, 0),
        (8, "st.shared.u32 [%r1], %r0;", 2, 1),
        (128, "st.shared.u32 [%r1], %r0;", 32, 31),
        (132, "st.shared.u32 [%r1], %r0;", 1, 0),
        (2, "st.shared.u16 [%r1], %h0;", 1, 0),
        (8, "st.shared.v2.u32 [%r1], {%r0, %r0};", 2, 0),
        (256, "st.shared.v2.u32 [%r1], {%r0, %r0};", 32, 30),
        (16, "st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0};", 4, 0),
        (32, "st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0};", 8, 4),
        (128, "st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0};", 32, 28),
        (8, "st.shared.u64 [%r1], %d0;", 2, 0),
    ],
)
def test_wavefronts_of_a_request(stride: int, instruction: str, wavefronts: int, conflicts: int) -> None:
    base = f"mov.u32 %r2, area;\nmad.lo.u32 %r1, %r0, {stride}, %r2;\n"
    found = counters(base + instruction, SHARED)
    assert (found.shared_written_wavefronts, found.shared_written_conflicts) == (wavefronts, conflicts)
    assert (found.shared_read_wavefronts, found.global_written_bytes) == (0, 0)


def test_reads_of_shared_memory_count_apart() -> None:
    base = "mov.u32 %r2, area;\nmad.lo.u32 %r1, %r0, 8, %r2;\nst.shared.v2.u32 [%r1], {%r0, %r0};\n"
    found = counters(base + "ld.shared.u32 %r3, [%r1];", SHARED)
    assert (found.shared_written_wavefronts, found.shared_read_wavefronts, found.shared_read_conflicts) == (2, 2, 1)


# One lane writes a word that all then reach.
ONE_WORD = "mov.u32 %r1, area;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.u32 [%r1], 0;\nbar.warp.sync -1;\n"


def test_a_word_is_read_once_for_all_lanes() -> None:
    found = counters(ONE_WORD + "ld.shared.u32 %r2, [%r1];", SHARED)
    assert (found.shared_read_wavefronts, found.shared_read_conflicts) == (1, 0)


def test_atomics_on_one_word_take_turns() -> None:
    found = counters(ONE_WORD + "red.shared.add.u32 [%r1], 1;", SHARED)
    assert (found.shared_written_wavefronts, found.shared_written_conflicts) == (1 + 32, 31)


@pytest.mark.parametrize(("row_bytes", "wavefronts"), [(16, 4), (128, 32), (144, 4), (32, 8)])
def test_wavefronts_of_ldmatrix(row_bytes: int, wavefronts: int) -> None:
    fill = (
        "mov.u32 %r9, area;\nmul.lo.u32 %r8, %r0, 16;\nadd.u32 %r8, %r8, %r9;\nmov.u32 %r7, 0;\nLOOP:\n"
        "st.shared.v4.u32 [%r8], {%r7, %r7, %r7, %r7};\nadd.u32 %r8, %r8, 512;\nadd.u32 %r7, %r7, 1;\n"
        "setp.lt.u32 %p1, %r7, 32;\n@%p1 bra LOOP;\nbar.warp.sync -1;\n"
    )
    load = (
        f"mad.lo.u32 %r1, %r0, {row_bytes}, %r9;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r2,%r3,%r4,%r5}}, [%r1];"
    )
    found = counters(fill + load, SHARED)
    assert (found.shared_read_wavefronts, found.shared_read_conflicts) == (wavefronts, wavefronts - 4)
    assert (found.instructions["ldmatrix"], found.shared_written_wavefronts) == (1, 32 * 4)


def test_copies() -> None:
    body = (
        at(16, 32)
        + "mov.u32 %r2, area;\nmad.lo.u32 %r1, %r0, 16, %r2;\n"
        + "setp.lt.u32 %p1, %r0, 16;\nselp.u32 %r3, 16, 0, %p1;\n"
        + "cp.async.cg.shared.global [%r1], [%d1], 16, %r3;\ncp.async.wait_all;\n"
    )
    found = counters(body, SHARED)
    # Half of the lanes write zeros and read nothing.
    assert (found.global_read_bytes, found.global_read_sectors) == (256, 8)
    assert (found.async_copied_bytes, found.shared_written_wavefronts) == (512, 4)


BULK = (
    "mov.u32 %r1, area;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 mbarrier.init.shared.b64 [%r1+1024], 1;\n"
    "@%p1 fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n"
)
AWAIT = (
    "WAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1+1024], 0;\n@!%p4 bra WAIT;\n"
    "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
)


def test_bulk_copies() -> None:
    body = BULK + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+1024], 256;\n@%p1 cp.async.bulk.shared::cta.global"
    body += ".mbarrier::complete_tx::bytes [%r1], [%d0+16], 256, [%r1+1024];\n" + AWAIT
    body += "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0+512], [%r1], 64;\n@%p1 cp.async.bulk.commit_group;\n"
    found = counters(body + "@%p1 cp.async.bulk.wait_group.read 0;\n", SHARED)
    assert (found.bulk_bytes, found.bulk_boxes, found.cluster_bytes, found.async_copied_bytes) == (320, 0, 0, 320)
    # Half a sector on either side.
    assert (found.global_read_bytes, found.global_read_sectors) == (256, 9)
    assert (found.global_written_bytes, found.global_written_sectors) == (64, 2)
    assert found.shared_read_wavefronts == found.shared_written_wavefronts == 0
    assert any(line.startswith("bulk_bytes") for line in found.lines())
    assert not any(line.startswith("cluster_bytes") for line in found.lines())


def test_a_multicast_reads_once() -> None:
    body = BULK + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+1024], 256;\nmov.u32 %r2, %cluster_ctarank;\n"
    body += (
        "setp.eq.u32 %p2, %r2, 0;\nand.pred %p2, %p1, %p2;\nmov.u16 %h1, 3;\n@%p2 cp.async.bulk.shared::cluster.global"
    )
    body += ".mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d0], 256, [%r1+1024], %h1;\n" + AWAIT
    found = counters(body, SHARED, cluster=2)
    assert (found.global_read_bytes, found.bulk_bytes, found.cluster_bytes) == (256, 512, 0)


def test_what_moves_between_ctas() -> None:
    body = BULK + "mov.u32 %r2, %cluster_ctarank;\nsub.u32 %r2, 1, %r2;\nmapa.shared::cluster.u32 %r3, %r1, %r2;\n"
    body += "mad.lo.u32 %r4, %r0, 4, %r3;\nst.shared::cluster.u32 [%r4], %r0;\nbarrier.cluster.arrive;\n"
    body += "barrier.cluster.wait;\nld.shared::cluster.u32 %r5, [%r4];\n"
    body += "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+1024], 8;\n"
    body += (
        "@%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r3+256], {%r0, %r0}, [%r3+1024];\n" + AWAIT
    )
    found = counters(body, SHARED, cluster=2)
    # Two CTAs write and read a word of each thread, and store eight bytes.
    assert found.cluster_bytes == 2 * (128 + 128 + 8)
    assert (found.instructions["ld.cluster"], found.instructions["st.cluster"]) == (2, 2)
    assert found.shared_read_wavefronts == found.shared_written_wavefronts == 0


def test_flops_and_classes() -> None:
    four = "{%r1,%r2,%r3,%r4}"
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {four}, {four}, {{%r1,%r2}}, {four};"
    found = counters(mma + "\nadd.f32 %r5, %r1, %r1;\nadd.u32 %r5, %r1, %r1;\ncvt.rn.f32.u32 %r5, %r0;\nbar.sync 0;")
    assert found.tensor_flops == 2 * 16 * 8 * 16
    # The thread's number and the address are moves of kernel().
    assert found.instructions == {
        "alu": 2, "barrier": 1, "branch": 1, "cvt": 1, "fp": 1, "ld.param": 1, "tensor": 1,
    }  # fmt: skip
    assert found.barriers == 1


def test_an_instruction_counts_for_each_group_of_lanes() -> None:
    body = "setp.lt.u32 %p1, %r0, 7;\n@%p1 bra LOW;\nadd.f32 %r1, %r1, %r1;\nbra END;\n"
    body += "LOW:\nadd.f32 %r2, %r1, %r1;\nEND:\n"
    assert counters(body).instructions["fp"] == 2
    assert counters(body + "mul.f32 %r3, %r1, %r1;").instructions["fp"] == 3


def test_failed_polls_do_not_count() -> None:
    """Warp 0 arrives after a long loop; how often warp 1 asks until then depends on the order of warps."""
    body = (
        "mov.u32 %r1, area;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra READY;\nmbarrier.init.shared.b64 [%r1], 1;\nREADY:\n"
        "bar.sync 0;\nsetp.ge.u32 %p1, %r0, 32;\n@%p1 bra WAIT;\nmov.u32 %r2, 0;\nLOOP:\nadd.u32 %r2, %r2, 1;\n"
        "setp.lt.u32 %p2, %r2, 9000;\n@%p2 bra LOOP;\nsetp.eq.u32 %p3, %r0, 0;\n"
        "@%p3 mbarrier.arrive.shared.b64 %d2, [%r1];\nbra END;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0;\n@!%p4 bra WAIT;\nEND:\n"
    )
    found = [counters(body, SHARED, seed, 64) for seed in range(8)]
    assert all(one == found[0] for one in found)
    # Init and arrival of one warp, the wait of the other.
    assert found[0].instructions["mbarrier"] == 3


def test_every_instruction_of_the_machine_has_a_class() -> None:
    names = load_library().numbers
    assert {class_of(name) for name in names} >= {"alu", "fp", "cvt", "tensor", "barrier", "branch", "async", "warp"}
    with pytest.raises(KeyError):
        class_of("entirely_new")


def test_sums() -> None:
    one = counters(at(4) + "ld.global.u32 %r1, [%d1];")
    twice = total([one, one])
    assert twice.instructions == {kind: 2 * count for kind, count in one.instructions.items()}
    assert all(getattr(twice, name) == 2 * getattr(one, name) for name in METRICS)
    text = "\n".join(one.lines())
    assert "global_read_sectors" in text and "instructions.ld.global" in text


def test_without_being_asked_nothing_is_measured() -> None:
    memory = Memory()
    assert launch(kernel("", 1), [memory.add("data", np.zeros(1, np.uint8))], memory).measured is None
