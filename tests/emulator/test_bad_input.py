"""Text that is no PTX, launches that do not fit, files that are broken: an error that says which, and nothing else."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cache_rows
import numpy as np
import pytest
from micro import kernel, launch

from dsagen import emulator, knobs
from dsagen.emulator import Memory, library, program_cache
from dsagen.emulator.launch import _program, coverage
from dsagen.emulator.library import load_library
from dsagen.emulator.program_cache import ProgramCache
from dsagen.errors import DsagenError, EmulatorError, ToolchainError

STORE = "ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r0, 4, %d0; st.global.u32 [%d0], %r0;"


def works() -> bool:
    memory, out = Memory(), np.zeros(32, np.uint32)
    launch(kernel(STORE), [memory.add("out", out)], memory)
    return out.tolist() == list(range(32))


@pytest.mark.parametrize(("body", "said"), [
    ("mov.u32 %r1 5 6;", "PTX line 12: operand '%r1 5 6' is not understood"),
    ("ld.global.u32 %r1, [%d1 * 2];", r"PTX line 12: address \[%d1 \* 2\] is not understood"),
    ("@%r1 mov.u32 %r1, 5;", "PTX line 12: guard %r1 is no declared predicate"),
    ("@%q mov.u32 %r1, 5;", "PTX line 12: guard %q is no declared predicate"),
    ("MOV.u32 %r1, 5;", "PTX line 12: 'MOV.u32 %r1, 5' is no instruction"),
    ("bra NOWHERE;", "PTX line 12: there is no label NOWHERE"),
    ("AGAIN: AGAIN: bra AGAIN;", "PTX line 12: label AGAIN stands here a second time"),
    ("brx.idx %r1, TABLE;", "PTX line 12: there is no .branchtargets TABLE"),
    (".reg .texref t;", "PTX line 12: registers of type .texref are not handled"),
    (".reg .b32 5x;", "PTX line 12: '5x' is no name of a register"),
    (".shared .align 3 .b8 x[4];", "PTX line 12: .align 3 is no power of two"),
    (".shared .b32 x[99999999999];", "PTX line 12: variable x takes 399999999996 bytes, more than 2 GiB"),
    (".const .b8 x[2] = {1, 2, 3};", "PTX line 12: 3 bytes initialise 2 of x"),
    (".global .b32 x = {oops};", "PTX line 12: initialiser 'oops' is neither a number nor a 64-bit address"),
    ("{ mov.u32 %r1, 5;", "its { is never closed"),
    ("mov.u32 %r1, 5", "PTX line 12"),
    ("setp.eq.u32 %p1, !%r1, 5;", "PTX line 12: .!%r1. names no predicate"),
    ("}", r"PTX line \d+: 'ret' is not understood"),
    ("mov.u32 %r1, 089;", "PTX line 12: operand '089' is not understood"),
    (".section .debug {", ".section without an end|never closed"),
    ("call (%r1), ;", "PTX line 12"),
])  # fmt: skip
def test_text_that_is_no_ptx_names_the_line(body: str, said: str) -> None:
    with pytest.raises(EmulatorError, match=said):
        launch(kernel(body), [64], Memory())
    assert works()


NONSENSE = """
mov.u32 %r1, %r9; add.u32 %r1, %r150, %r151;
setp.eq.u32 %p1, %r1, %r2; @%p7 exit; @!%p8 mov.u64 %d1, %d2;
mov.b32 %r1, tile;
mov.u32 %r1;
add.u32;
st.global.u32 %r1, [%d1];
ld.param.u64 %d1, [q7];
bar.sync %r9;
shfl.sync.idx.b32 %r1, %r0, 0, 31, %r9;
mov.f32 %r1, 1.5e999;
call nobody, (%r1);
ret; ret;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 %r1, %r2, %r3, %r4;
cvt.rn.f16.f32 %r1, %d1;
brx.idx %r9, T;
cp.async.ca.shared.global [%r1], [%d1], %r5;
cp.async.ca.shared.global [%r9], [%d1], 16;
lop3.b32 %r1, %r2, %r3, %r4, %r5;
mbarrier.init.shared.b64 [%r9], 1;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%d1], %r1, [%r2];
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r9];
atom.global.add.u32 %r1, [%d5], 1;
LOOP: bra LOOP;
LOOP: nanosleep.u32 5; bra LOOP;
elect.sync _|%p1, %r9;
nanosleep.u32 %r9;
setmaxnreg.inc.sync.aligned.u32 232;
mov.b64 {%r1, %r2}, %r3;
mov.b32 %r1, {%h1, %h2, %h3};
mov.b128 %d1, {%d2, %d3};
ld.local.u32 %r1, [%d9];
ld.shared.v4.b64 {%d1, %d2, %d3, %d4}, [%r9];
div.u32 %r1, %r2, 0; rem.s64 %d1, %d2, -1;
shl.b64 %d1, %d2, %r9;
""".strip().splitlines()


@pytest.mark.parametrize("body", NONSENSE)
def test_programs_that_parse_and_make_no_sense(body: str) -> None:
    table = "T: .branchtargets A, A;\nA:\n" if "brx" in body else ""
    for threads in (1, 32, 50):
        for seed in range(2):
            try:
                launch(kernel(table + body), [64], Memory(), threads=threads, seed=seed, instruction_limit=5000)
            except EmulatorError as error:
                assert re.search(r"PTX line \d+|deadlock|livelock", str(error))
    assert works()


REAL = (kernel(STORE), kernel(
    ".shared .align 16 .b8 tile[256];\n.loc 1 5 3\nmov.u32 %r1, tile; @%p1 bra END;\n"
    "{ .reg .b32 %x<4>; mov.b32 {%h1, %h2}, %r1; }\n"
    "T: .branchtargets END, MORE;\nbrx.idx %r0, T;\nMORE: shfl.sync.up.b32 %r3|%p2, %r1, 1, 0, -1;\n// text { ; }\n"
    "END: bar.sync 0;"
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r7}, {%r1,%r2,%r3,%r4};",
    2, ".global .align 8 .u64 table[2] = {generic(f), 7};\n"
    ".func (.param .b32 r) f(.param .b32 a) { .reg .b32 x; ld.param.b32 x, [a];"
    " st.param.b32 [r], x; ret; }\n",
))  # fmt: skip
PIECES = (
    "%r1", "%d1", "%p1", "0", "-1", "{", "}", "[", "]", ";", ",", ".", "|", "@%p1", "bra", "T", "%tid.x", "ret",
    "99999999999999999999",
    "0f7fc00000", ".u32", ".b128", ".shared", ".param", "call", "_", "!", "(", ")", '"', "/*", "//", ":",
    ".loc 1 99999999999 1", "\n",
    "é", "٣", ".reg .b32 x;", "9" * 5000, ".align", "= {", "\0",
)  # fmt: skip


def mutated(text: str, dice: random.Random) -> str:
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, end = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
        words = list(re.finditer(r"%\w+|\.\w+|\w+", text))
        match dice.randrange(6):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + text[min(at + dice.randrange(20), end) :]
            case 2:
                text = text[:at] + dice.choice(PIECES) + text[at:]
            case 3:
                text = text[:at] + text[at : at + dice.randrange(60)] + text[at:]
            case _ if words:
                old, new = dice.choice(words), dice.choice((*PIECES, dice.choice(words)[0]))
                text = text[: old.start()] + new + text[old.end() :]
    return text


@pytest.mark.parametrize("seed", range(12))
def test_mutated_text_gives_errors_and_no_crash(seed: int) -> None:
    dice = random.Random(seed)
    ran = 0
    for _ in range(150):
        text = mutated(dice.choice(REAL), dice)
        memory, out = Memory(), np.zeros(64, np.uint32)
        address = memory.add("out", out)
        try:
            coverage(text)
            for count in (8, 16):
                params = struct.pack("<2Q", address, address)[:count]
                emulator.launch(
                    text,
                    "k",
                    1,
                    dice.choice((1, 32, 50)),
                    params,
                    64,
                    memory,
                    seed=dice.randrange(2),
                    instruction_limit=2000,
                )
                ran += 1
        except EmulatorError as error:
            assert str(error)
    assert ran > 0
    assert works()


def damaged(text: str, dice: random.Random) -> str:
    """One bit flipped, some bytes lost, or the end."""
    at = dice.randrange(len(text))
    match dice.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + text[at + dice.randrange(1, 200) :]
        case _:
            return text[:at] + chr(ord(text[at]) ^ 1 << dice.randrange(7)) + text[at + 1 :]


@pytest.mark.compile
def test_damage_to_what_nvcc_wrote_gives_errors_and_no_crash() -> None:
    whole, dice = cache_rows.kernel("read", "sm_90a", kv="v32"), random.Random(5)
    plan, outcomes = whole.plan, set()
    memory = Memory()
    address = memory.add("memory", np.zeros(1 << 16, np.uint8))
    params = struct.pack("<Q", address) * (plan.params_bytes // 8)
    for _ in range(60):
        text = damaged(whole.ptx, dice)
        try:
            coverage(text)
            emulator.launch(text, plan.symbol, 1, plan.threads, params, plan.smem_bytes, memory, instruction_limit=5000)
            outcomes.add("ran")
        except EmulatorError as error:
            outcomes.add("parsed" if "thread" in str(error) else "refused")
    assert outcomes >= {"parsed", "refused"}
    assert works()


# ---- launches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "said"), [
    ({"grid": (1, 70000)}, r"grid \(1, 70000\): y is 70000, the limit is 65535"),
    ({"grid": (2**31, 1)}, "x is 2147483648, the limit is 2147483647"),
    ({"grid": (2**31 - 1, 60000, 60000)}, "CTAs; the limit is"),
    ({"grid": ()}, "expected one to three positive sizes"),
    ({"grid": "12"}, "expected one to three positive sizes"),
    ({"block": (1, 1, 65)}, "z is 65, the limit is 64"),
    ({"block": (32, 64)}, "a block of 2048 threads; the limit is 1024"),
    ({"params": b"1234"}, "4 bytes of arguments, the kernel takes 8"),
    ({"params": [64]}, "arguments are list, expected bytes"),
    ({"smem": 300000}, "0 bytes of static and 300000 of dynamic shared memory; a block of sm_90a has 232448"),
    ({"entry": "other"}, "there is no kernel 'other' in the PTX; it has k"),
    ({"seed": -1}, "seed -1: a seed has 64 bits and no sign"),
    ({"os_threads": 0}, "os_threads 0: at least 1 each"),
    ({"instruction_limit": 0}, "instruction_limit 0: at least 1"),
    ({}, "write of 4 bytes at global address 0x40: no buffer is registered"),
])  # fmt: skip
def test_launches_that_do_not_fit(change: dict[str, object], said: str) -> None:
    given = {"entry": "k", "grid": 1, "block": 32, "params": struct.pack("<Q", 64), "smem": 0} | change
    entry, grid, block, params, smem = (given.pop(name) for name in ("entry", "grid", "block", "params", "smem"))
    with pytest.raises(EmulatorError, match=said):
        emulator.launch(kernel(STORE), entry, grid, block, params, smem, Memory(), **given)  # type: ignore[arg-type]
    assert works()


def test_shared_memory_is_that_of_the_target() -> None:
    text = kernel("").replace("sm_90a", "sm_89")
    emulator.launch(text, "k", 1, 32, bytes(8), 99 * 1024, Memory())
    with pytest.raises(EmulatorError, match="a block of sm_89 has 101376"):
        emulator.launch(text, "k", 1, 32, bytes(8), 99 * 1024 + 1, Memory())
    with pytest.raises(EmulatorError, match="50000 bytes of static shared memory, the limit is 49152"):
        launch(kernel(".shared .b8 x[50000];"), [0], Memory())
    with pytest.raises(EmulatorError, match="bytes of local memory a thread, the limit is 524288"):
        launch(kernel(".local .b8 x[600000];"), [0], Memory())


def test_numpy_integers_are_sizes() -> None:
    emulator.launch(kernel(""), "k", np.int64(2), [np.int32(32), 1], bytes(8), 0, Memory())


def test_no_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(knobs, "foreign", lambda name: str(tmp_path))
    with pytest.raises(DsagenError, match=r"no g\+\+ on PATH"):
        load_library(tmp_path / "machine")


def test_a_compiler_that_fails_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "vm"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int broken(\n")
    monkeypatch.setattr(library, "SOURCES", sources)
    with pytest.raises(ToolchainError, match=r"machine does not compile: (.|\n)*broken\.cpp(.|\n)*error"):
        load_library(tmp_path / "machine")


# ---- programs on disk -----------------------------------------------------------------------------------------------

launch_module = emulator.launch.__module__
# Workers of one test run share the folder: a text of this process is no other's.
LONG = kernel(STORE + "\n" + f"add.u32 %r1, %r1, {os.getpid()};\n" * 1200)


@pytest.fixture
def cache() -> Iterator[ProgramCache]:
    found = ProgramCache.beside(load_library())
    found.path(LONG, "k").unlink(missing_ok=True)
    _program.cache_clear()
    yield found
    found.path(LONG, "k").unlink(missing_ok=True)


def run_long() -> bool:
    _program.cache_clear()
    memory, out = Memory(), np.zeros(32, np.uint32)
    launch(LONG, [memory.add("out", out)], memory)
    return out.tolist() == list(range(32))


def test_a_program_is_read_once(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_long()
    assert cache.path(LONG, "k").is_file()
    first = cache.read(LONG, "k")
    monkeypatch.setattr(sys.modules[launch_module], "assemble", None)
    assert run_long()
    assert first == cache.read(LONG, "k")


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:100], lambda data: data[:-1], lambda data: data[:200] + b"x" + data[201:],
    lambda data: b"x" + data[1:], lambda data: data + b"x", lambda data: bytes(len(data)),
])  # fmt: skip
def test_a_damaged_program_is_made_again(cache: ProgramCache, damage: object) -> None:
    assert run_long()
    path = cache.path(LONG, "k")
    whole = path.read_bytes()
    assert callable(damage)
    path.write_bytes(damage(whole))
    assert cache.read(LONG, "k") is None
    assert run_long()
    assert path.read_bytes() == whole


def test_other_machines_and_modules_have_other_programs(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        cache.path(LONG, "k"),
        cache.path(LONG, "other"),
        cache.path(LONG + " ", "k"),
        ProgramCache(cache.folder, "x").path(LONG, "k"),
    }
    monkeypatch.setattr(program_cache, "_front_end", lambda: "other rules")
    paths.add(cache.path(LONG, "k"))
    assert len(paths) == 5


def test_writers_do_not_disturb_each_other(cache: ProgramCache) -> None:
    assert run_long()
    program = cache.read(LONG, "k")
    assert program is not None
    failures = []

    def work() -> None:
        for _ in range(30):
            cache.write(LONG, "k", program)
            if cache.read(LONG, "k") != program:
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert list(cache.folder.glob(f"{cache.path(LONG, 'k').stem}*.partial")) == []


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProgramCache(tmp_path / "file" / "programs", "machine")
    program = _program(LONG, "k", None)
    cache.write(LONG, "k", program)
    assert cache.read(LONG, "k") is None


def test_a_fault_leaves_a_new_process_as_it_was() -> None:
    # A crash of the machine would take the process with it.
    here = Path(__file__).resolve()
    code = f"import sys; sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2])!r}]\nimport test_bad_input as t\n"
    # The machine of this session, not another one below the session's store.
    code += f"t.library._folders = lambda: (t.Path({str(load_library().folder)!r}),)\n"
    code += "try: t.launch(t.kernel('trap;'), [0], t.Memory())\nexcept t.EmulatorError: print(t.works())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr[-500:]
