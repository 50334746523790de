"""Bulk copies, their groups and reductions, and what the proxies demand around them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(8)
SHARED = ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b8 bar[16];\n"
# %r1 the tile, %r10 the mbarrier, %r2 the thread's word of the tile; %p1 is thread 0, %d0 in, %d1 out.
SETUP = """
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, tile; mov.u32 %r10, bar; mad.lo.u32 %r2, %r0, 4, %r1;
mad.wide.u32 %d2, %r0, 4, %d1; setp.eq.u32 %p1, %r0, 0;
"""
INIT = "@%p1 mbarrier.init.shared.b64 [%r10], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;\n"
LOAD = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 128;\n"
LOAD += (
    "@%p1 cp.async.bulk.shared::{space}.global.mbarrier::complete_tx::bytes{hint} [%r1], [%d0], 128, [%r10]{policy};\n"
)
WAIT = "W{n}: mbarrier.try_wait.parity.shared.b64 %p3, [%r10], {n}; @!%p3 bra W{n};\n"
LOAD_ONE = LOAD.format(space="cta", hint="", policy="")
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128;\n"
COMMIT, DONE = "@%p1 cp.async.bulk.commit_group;\n", "@%p1 cp.async.bulk.wait_group 0;\n"
READ = "@%p1 cp.async.bulk.wait_group.read 0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
WRITE = "add.u32 %r3, %r0, 7; st.shared.u32 [%r2], %r3;\n"


def copies(body: str, seed: int = 0, **options: int) -> np.ndarray:
    """What `body` leaves in 256 words of memory; it reads 256 random ones."""
    memory, source, out = Memory(), np.arange(1000, 1256, dtype=np.uint32), np.full(256, 5, np.uint32)
    addresses = [memory.add("source", source), memory.add("out", out)]
    launch(kernel(SETUP + body, 2, SHARED), addresses, memory, seed=seed, **options)
    return out


def fault(body: str, seed: int = 0, **options: int) -> str:
    with pytest.raises(EmulatorError) as caught:
        copies(body, seed, **options)
    return str(caught.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("space", "hint"), [("cta", False), ("cluster", False), ("cluster", True)])
def test_global_memory_to_shared(space: str, hint: bool, seed: int) -> None:
    load = LOAD.format(space=space, hint=".L2::cache_hint" if hint else "", policy=", %d9" if hint else "")
    body = "createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;\n" if hint else ""
    body += INIT + load + WAIT.format(n=0) + "ld.shared.u32 %r3, [%r2]; st.global.u32 [%d2], %r3;"
    assert copies(body, seed)[:32].tolist() == list(range(1000, 1032))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hint", [False, True])
def test_shared_memory_to_global(hint: bool, seed: int) -> None:
    store = STORE.replace("bulk_group", "bulk_group.L2::cache_hint").replace(";", ", %d9;") if hint else STORE
    body = ("createpolicy.fractional.L2::evict_first.b64 %d9, 1.0;\n" if hint else "") + WRITE + FENCE + "bar.sync 0;\n"
    found = copies(body + store + COMMIT + READ, seed, threads=32)
    assert found.tolist() == [*range(7, 39), *[5] * 224]
    # Whoever has waited for all of it may read what was written.
    after = DONE + "bar.sync 0; ld.global.u32 %r4, [%d2]; add.u32 %r4, %r4, 1; st.global.u32 [%d2], %r4;"
    assert copies(body + store + COMMIT + after, seed)[:32].tolist() == list(range(8, 40))


VALUES = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f32": np.float32, "f64": np.float64, "f16": np.float16,
}  # fmt: skip
NUMPY = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
NUMPY |= {"xor": np.bitwise_xor}


@pytest.mark.parametrize(("operation", "kind"), [
    *((op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32", "u64", "f16")),
    *((op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")),
    ("add", "f32"), ("add", "f64"), ("min", "s64"), ("max", "s64"),
])  # fmt: skip
def test_reductions_in_global_memory(operation: str, kind: str) -> None:
    dtype, memory = VALUES[kind], Memory()
    raw = [RANDOM.integers(-100, 100, 128).astype(dtype) for _ in range(2)]
    source, out = (np.resize(values, 128 // np.dtype(dtype).itemsize).copy() for values in raw)
    want = NUMPY[operation](out, source)
    addresses = [memory.add("source", source), memory.add("out", out)]
    noftz = ".noftz" if operation == "add" and kind == "f16" else ""
    reduce = f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}{noftz}.{kind} [%d1], [%r1], 128;\n"
    launch(kernel(SETUP + INIT + LOAD_ONE + WAIT.format(n=0) + reduce + COMMIT + DONE, 2, SHARED), addresses, memory)
    assert out.tolist() == want.tolist()


def test_reductions_of_several_ctas_do_not_race() -> None:
    reduce = "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r1], 128;\n"
    for seed in range(3):
        found = copies(WRITE + FENCE + "bar.sync 0;\n" + reduce + COMMIT + READ, seed, grid=5, resident=5)
        assert found[:32].tolist() == [5 + 5 * (n + 7) for n in range(32)]
    read = reduce + COMMIT + DONE + "ld.global.u32 %r4, [%d2];"
    assert "race: read of bytes" in fault(WRITE + FENCE + "bar.sync 0;\n" + read)


@pytest.mark.parametrize("kind", ["inc", "dec"])
def test_counting_reductions(kind: str) -> None:
    reduce = f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind}.u32 [%d1], [%r1], 128;\n"
    found = copies("mov.u32 %r3, 5; st.shared.u32 [%r2], %r3;" + FENCE + "bar.sync 0;\n" + reduce + COMMIT + DONE)
    assert found[:32].tolist() == [0 if kind == "inc" else 4] * 32


def test_prefetches_do_nothing() -> None:
    body = "@%p1 cp.async.bulk.prefetch.L2.global [%d0], 128;"
    body += "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%d0], 64, %d5;"
    assert copies(body).tolist() == [5] * 256
    assert "18 bytes are no positive multiple of 16" in fault("cp.async.bulk.prefetch.L2.global [%d0], 18;")


@pytest.mark.parametrize(("change", "said"), [
    (("128, [%r10]", "120, [%r10]"), "120 bytes are no positive multiple of 16"),
    (("[%d0], 128", "[%d0], 0"), "0 bytes are no positive multiple of 16"),
    (("[%r1], [%d0]", "[%r1+8], [%d0]"), "an address is no multiple of 16"),
    (("[%r1], [%d0]", "[%r1], [%d0+4]"), "an address is no multiple of 16"),
    (("[%r1], [%d0]", "[%r1], [%d0+1024]"), "0 bytes past the end of buffer source"),
    (("[%r1], [%d0]", "[%r1+2048], [%d0]"), "cp.async.bulk of 128 bytes at shared byte 2048: the CTA has 1040"),
    (("], 128, [%r10]", "], 128, [%r10+8]"), "no mbarrier was initialised at shared byte 1032"),
])  # fmt: skip
def test_loads_that_are_refused(change: tuple[str, str], said: str) -> None:
    assert said in fault(INIT + LOAD_ONE.replace(*change) + WAIT.format(n=0))


def test_a_copy_into_what_may_not_be_written() -> None:
    memory, out = Memory(), np.zeros(64, np.uint32)
    addresses = [0, memory.add("out", out, writable=False)]
    with pytest.raises(EmulatorError, match="into the read-only buffer out"):
        launch(kernel(SETUP + WRITE + FENCE + "bar.sync 0;" + STORE, 2, SHARED), addresses, memory)


def test_bytes_that_never_come() -> None:
    found = fault(INIT + LOAD_ONE.replace("_, [%r10], 128", "_, [%r10], 144") + WAIT.format(n=0))
    assert "deadlock" in found
    assert "0 of 1 arrivals and 16 bytes are missing, phase 0" in found
    found = fault(INIT + "@%p1 mbarrier.expect_tx.shared.b64 [%r10], 16;")
    assert "the mbarrier at shared byte 1024 waits for 16 bytes that were announced and never came" in found
    assert "ends with 16 bytes at the mbarrier" in fault(INIT + "@%p1 mbarrier.complete_tx.shared.b64 [%r10], 16;")
    assert "bytes are out of range" in fault(INIT + "@%p1 mbarrier.expect_tx.shared.b64 [%r10], 1048576;")


def test_a_cta_that_ends_too_early() -> None:
    assert "still reads its shared memory (PTX line" in fault(WRITE + FENCE + "bar.sync 0;" + STORE + COMMIT)
    assert "on the way to its shared memory (PTX line" in fault(INIT + LOAD_ONE)


# ---- order and proxies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_store_needs_a_fence_after_what_was_written(seed: int) -> None:
    copies(WRITE + FENCE + "bar.sync 0;\n" + STORE + COMMIT + READ, seed, threads=32)
    copies(WRITE + "bar.sync 0;\n@%p1 " + FENCE + STORE + COMMIT + READ, seed, threads=32)
    found = fault(WRITE + "bar.sync 0;\n" + STORE + COMMIT + READ, seed, threads=32)
    assert re.search(
        r"proxy: a bulk copy from shared bytes 0 to 127, which CTA \(0, 0, 0\) warp 0, lane 0 wrote \(PTX line \d+\), "
        r"without fence.proxy.async in between",
        found,
    )
    assert "race: read by a bulk copy of shared bytes" in fault(WRITE + FENCE + STORE + COMMIT + READ, seed, threads=32)
    partly = WRITE.replace("st.shared", "setp.lt.u32 %p2, %r0, 31; @%p2 st.shared")
    assert "some of which nobody has written" in fault(partly + FENCE + STORE, seed)


AGAIN = "bar.sync 0; st.shared.u32 [%r2], 1;\n"


@pytest.mark.parametrize("seed", range(4))
def test_a_source_is_overwritten_only_after_it_was_read(seed: int) -> None:
    begin = WRITE + FENCE + "bar.sync 0;\n" + STORE + COMMIT
    assert copies(begin + READ + AGAIN, seed, threads=32)[:32].tolist() == list(range(7, 39))
    found = fault(begin + AGAIN + READ, seed, threads=32)
    assert re.search(
        r"race: write of shared bytes 0 to 3, which CTA \(0, 0, 0\) warp 0, lane 0 had copied asynchronously and reads "
        r"\(PTX line \d+\)",
        found,
    )
    # One group may remain, and it is this one.
    assert "had copied asynchronously and reads" in fault(begin + READ.replace("0;", "1;") + AGAIN + READ, seed)
    # Only the thread that asked has waited.
    assert "had copied asynchronously and reads" in fault(begin + READ.replace("%p1", "!%p1") + AGAIN + READ, seed)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_stored_is_read_only_after_all_of_it_was_waited_for(seed: int) -> None:
    begin, read = WRITE + FENCE + "bar.sync 0;\n" + STORE + COMMIT, "bar.sync 0; ld.global.u32 %r4, [%d2];"
    copies(begin + DONE + read, seed)
    found = fault(begin + READ + read, seed)
    assert re.search(r"race: read of bytes 0 to 3 of buffer out, which .* had copied asynchronously and writes", found)


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_waited_for_in_their_order(seed: int) -> None:
    second = STORE.replace("[%d1], [%r1]", "[%d1+128], [%r1+128]")
    write = WRITE + "st.shared.u32 [%r2+128], %r3;\n" + FENCE + "bar.sync 0;\n"
    wait = "@%p1 cp.async.bulk.wait_group.read 1;\n"
    copies(write + STORE + COMMIT + second + COMMIT + wait + AGAIN + READ, seed)
    late = AGAIN.replace("[%r2]", "[%r2+128]")
    assert "had copied asynchronously and reads" in fault(
        write + STORE + COMMIT + second + COMMIT + wait + late + READ, seed
    )


def test_global_memory_that_the_kernel_has_written_needs_a_fence_too() -> None:
    write = INIT + "mad.wide.u32 %d3, %r0, 4, %d0; st.global.u32 [%d3], %r0;\n{}bar.sync 0;\n"
    read = LOAD_ONE + WAIT.format(n=0) + "ld.shared.u32 %r3, [%r2]; st.global.u32 [%d2], %r3;"
    assert copies(write.format("fence.proxy.async;\n") + read)[:32].tolist() == list(range(32))
    assert "proxy: a bulk copy from bytes 0 to 127 of buffer source" in fault(write.format("") + read)
    unordered = write.format("fence.proxy.async;\n").replace("bar.sync 0;\n" + LOAD_ONE, LOAD_ONE)
    assert "race: read of bytes" in fault((unordered + read).replace("async;\nbar.sync 0;", "async;"), threads=64)
