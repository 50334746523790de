"""CUDA programs as nvcc compiles them for each generation: calls, and instructions by way of intrinsics.

What nvcc makes of an intrinsic differs by architecture, one instruction here and a dozen there, and all must agree.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dsagen.arch import ARCHS
from dsagen.build import find_toolchain
from dsagen.emulator import Memory, coverage, launch
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile
FOLDER = Path(__file__).parent / "programs"
ARCHS_TRIED = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@cache
def program(name: str, arch: str) -> str:
    """PTX of a program, kept over runs by its text."""
    source = FOLDER / f"{name}.cu"
    toolchain = find_toolchain({arch: ARCHS[arch].min_cuda})
    key = hashlib.sha256(source.read_bytes() + f"{arch} {toolchain}".encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"dsagen-emulator-programs-{key}.ptx"
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            out = Path(folder) / kept.name
            command = [str(toolchain.nvcc), f"-arch={arch}", "-std=c++17", "-ptx", "-lineinfo", "-w", str(source)]
            subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
            out.replace(kept)
    return kept.read_text()


@pytest.mark.parametrize("arch", ARCHS_TRIED)
def test_every_instruction_is_there(arch: str) -> None:
    assert coverage(program("instructions", arch)) == {}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_instruction_of_clusters_is_there(arch: str) -> None:
    text = program("hopper", arch)
    assert coverage(text) == {}
    assert all(
        word in text for word in ("st.async", "red.async", "cp.reduce.async.bulk.tensor.5d", "mapa", "multicast")
    )


# ---- calls ----------------------------------------------------------------------------------------------------------


def call(kernel: str, arch: str, n: int) -> list[int]:
    memory, out = Memory(), np.arange(32, dtype=np.int32)
    params = struct.pack("<QI", memory.add("out", out), n)
    launch(program("calls", arch), kernel, 1, 32, params, 0, memory, races=False)
    return out.tolist()


def twice(x: int) -> int:
    return 2 * x + 1


@pytest.mark.parametrize("arch", ARCHS_TRIED)
def test_calls(arch: str) -> None:
    table = (3, 1, 4, 1, 5, 9, 2, 6)
    want = [
        twice(t) + twice(t + 3) + (twice(t) if t & 1 else 0) + 2 * t + 3 + 1000 - t + table[t & 7] for t in range(32)
    ]
    assert call("calls", arch, 3) == want
    assert call("indirect", arch, 1) == [3 * t if t & 1 else t + 3 for t in range(32)]
    assert call("virt", arch, 5) == [t + 100 if t % 3 == 0 else 5 * t for t in range(32)]


@pytest.mark.parametrize("arch", ARCHS_TRIED)
def test_a_recursion_is_refused_by_name_when_it_is_called(arch: str) -> None:
    assert call("recursive", arch, 0) == [7] * 32
    with pytest.raises(
        EmulatorError, match=r"call _Z3oddi \(a recursion: _Z3oddi can call _Z4eveni\).*\n  at PTX line \d+, CUDA line"
    ):
        call("recursive", arch, 2)
    assert all("a recursion" in text for text in coverage(program("calls", arch)))


@pytest.mark.parametrize("arch", ARCHS_TRIED)
def test_an_indexed_branch(arch: str) -> None:
    want = []
    for t in range(32):
        case, n = t % 11, 12
        want.append(
            {
                0: n * 3 + t,
                1: n ^ t,
                2: n + 5 * t,
                3: (n + t).bit_count(),
                4: 28,
                5: n // (t + 1),
                6: None,
                7: -t,
                8: 9,
            }.get(case, 77)
        )
    found = call("switches", arch, 12)
    # Case 6 reads what a neighbour may have written.
    assert [x for x, y in zip(found, want, strict=True) if y is not None] == [y for y in want if y is not None]


def test_printf_prints_and_a_failed_assertion_says_which(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("speaks", "sm_90a", 3) == [3] * 32
    assert capfd.readouterr().out == "".join(f"thread {t} of 3, 1.500000 text 1099511627776 x%\n" for t in range(32))
    with pytest.raises(
        EmulatorError, match=r'assertion n < 5 && "too many" failed: \S*calls.cu, line \d+, void speaks'
    ):
        call("speaks", "sm_90a", 5)


# ---- the same results everywhere ------------------------------------------------------------------------------------


def arguments(kernel: str) -> list[np.ndarray | int]:
    random = np.random.default_rng(5)

    def words(count: int) -> np.ndarray:
        return random.integers(0, 2**32, count, dtype=np.uint32)

    def floats(count: int) -> np.ndarray:
        return (random.standard_normal(count) * 4.0 ** random.integers(-9, 9, count)).astype(np.float32)

    def halves(count: int) -> np.ndarray:
        return random.standard_normal(count).astype(np.float16).view(np.uint32)

    zeros = np.zeros
    return {
        "ints": [zeros(64, np.uint32), words(64), words(64), 5],
        "floats": [zeros(64, np.float32), abs(floats(64)), abs(floats(64)), floats(64).astype(np.float64), 3],
        "halves": [zeros(64, np.uint32), halves(128), halves(128), halves(128), 7],
        "narrow": [zeros(64, np.uint32), floats(512), 0x12345678],
        "warps": [zeros(64, np.uint32), words(64) >> 20, 7],
        "copies": [zeros(1024, np.float32), floats(1024), 16],
        "wmmas": [zeros(32, np.float32), *(halves(256) for _ in range(3)), *(zeros(4, np.int32) for _ in range(3))],
    }[kernel]  # fmt: skip


def results(kernel: str, arch: str) -> list[np.ndarray]:
    memory, params, given = Memory(), b"", arguments(kernel)
    for n, argument in enumerate(given):
        if isinstance(argument, int):
            params += struct.pack("<i", argument)
        else:
            params += b"\0" * (-len(params) % 8) + struct.pack("<Q", memory.add(f"argument{n}", argument))
    smem = {"copies": 65536, "wmmas": 8192}.get(kernel, 0)
    launch(program("instructions", arch), kernel, 1, 32, params, smem, memory, races=False)
    return [argument for argument in given if not isinstance(argument, int)]


@pytest.mark.parametrize("kernel", ["ints", "floats", "halves", "narrow", "warps", "copies"])
def test_every_generation_gives_the_same(kernel: str) -> None:
    first = results(kernel, ARCHS_TRIED[0])
    assert len(np.unique(first[0])) > 8
    for arch in ARCHS_TRIED[1:]:
        for one, other in zip(first, results(kernel, arch), strict=True):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), arch


def test_products_of_every_generation_run() -> None:
    for arch in ARCHS_TRIED:
        assert len(np.unique(results("wmmas", arch)[0])) > 8


# ---- where a line comes from ----------------------------------------------------------------------------------------


def test_a_message_says_where_a_line_was_inlined() -> None:
    text = program("instructions", "sm_90a")
    memory = Memory()
    params = struct.pack("<QQi", 64, 64, 3)
    with pytest.raises(EmulatorError) as caught:
        launch(text, "warps", 1, 32, params, 0, memory)
    message = str(caught.value)
    assert re.search(
        r"read of 4 bytes at global address 0x40: \d+ bytes before buffer \w+\n  at PTX line \d+, CUDA line \d+",
        message,
    )
    # The reduction of a tile is a call of calls in a header.
    fault = text.replace("redux.sync.and.b32", "trap; // ", 1)
    out, words = np.zeros(64, np.uint32), np.ones(64, np.uint32)
    params = struct.pack("<QQi", memory.add("out", out), memory.add("words", words), 3)
    with pytest.raises(EmulatorError, match=r"PTX line \d+ is line \d+ of \w+\.\w+, inlined at .*line \d+\n"):
        launch(fault, "warps", 1, 32, params, 0, memory)
