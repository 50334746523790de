"""The sparse decode kernels, as nvcc emits them, in several orders of warps, and with faults planted in them.

Their results are held to the reference by test_conformance_emulated.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import decode
import pytest

from dsagen.check.cases import DecodeCase, Lengths, Values
from dsagen.errors import EmulatorError
from dsagen.render import render

pytestmark = pytest.mark.compile

SMALL = DecodeCase("small", batch=2, s_q=1, kv_tokens=150, topk=140, page_size=64)
WILD = replace(SMALL, lengths=Lengths.PER_REQUEST, wild_ids=True, sink=True, strided=True, padded_pages=True)
KERNELS = [("v32", "sm_90a"), ("v32", "sm_80"), ("bf16", "sm_90a"), ("bf16", "sm_80"), ("v32", "sm_100a")]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_results_do_not_depend_on_the_schedule(arch: str) -> None:
    case = replace(WILD, batch=1)
    first = decode.run(case, "v32", 16, arch)
    for seed in range(1, 6):
        again = decode.run(case, "v32", 16, arch, seed=seed)
        assert first.out.view(-1).equal(again.out.view(-1))
        assert first.lse.equal(again.lse)


# ---- planted faults -------------------------------------------------------------------------------------------------

# Long enough that every ring goes round.
LONG = replace(SMALL, batch=1, kv_tokens=800, topk=700, wild_ids=True)
WAIT = r"^\s*mbarrier\.\w+_wait\.parity\.shared\.b64 p, [^;]*;"
# Taking these out changes nothing. The value warps' own wait for rows: the score warps have awaited the same rows
# before they publish the probabilities, for which the value warps wait as well. The barrier at the start of finish():
# what raise_reference() reads of block_value it reads before its own second barrier.
REDUNDANT = (
    "ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), parity);",
    "sync();  // the last raise may still be reading block_value",
)


def mutant(kernel: decode.Kernel, pattern: str, replacement: str, which: int = 0) -> decode.Kernel:
    """A kernel with the `which`-th match of a pattern in its PTX replaced."""
    matches = list(re.finditer(pattern, kernel.ptx, re.MULTILINE))
    assert len(matches) > which, f"{pattern} occurs {len(matches)} times"
    match = matches[which]
    return replace(kernel, ptx=kernel.ptx[: match.start()] + replacement + kernel.ptx[match.end() :])


def call_sites(kernel: decode.Kernel, at: int) -> str:
    """The CUDA lines, outermost first, that call the prim whose instruction stands at an offset of the PTX."""
    lines = render(kernel.plan).text.splitlines()
    return " > ".join(lines[int(n) - 1].strip() for n in re.findall(r"inlined_at 1 (\d+)", kernel.ptx[:at])[-2:])


def outcome(kernel: decode.Kernel, fmt: str, arch: str, seeds: range = range(4)) -> str:
    """The first complaint over some schedules: of the machine, or of the comparison."""
    # The logits of the second input rise to the end, so that the reference does too.
    for seed, case in product(seeds, (LONG, replace(LONG, values=Values.RAMP_UP))):
        try:
            found = decode.problem(case, fmt, decode.run(case, fmt, 16, arch, seed=seed, main=kernel))
        except EmulatorError as error:
            return str(error)
        if found:
            return found
    return ""


def test_an_unguarded_id_is_out_of_bounds() -> None:
    kernel = decode.main_kernel("v32", 16, "sm_90a")
    text = render(kernel.plan).text
    guard = "return id >= 0 && static_cast<u32>(id) < tokens;"
    assert text.count(guard) == 1
    faulty = replace(kernel, ptx=decode.compile_ptx(text.replace(guard, "return true;"), "sm_90a"))
    found = outcome(faulty, "v32", "sm_90a", range(1))
    assert re.search(r"read of 656 bytes at global address 0x\w+: \d+ bytes (before|past the end of) buffer", found)
    assert re.search(r"PTX line \d+, CUDA line \d+, thread \d+", found)


def test_the_unchanged_kernels_give_no_report() -> None:
    for fmt, arch in KERNELS:
        assert outcome(decode.main_kernel(fmt, 16, arch), fmt, arch, range(6)) == ""


@pytest.mark.parametrize(("fmt", "arch"), KERNELS)
def test_every_removed_wait_is_noticed(fmt: str, arch: str) -> None:
    kernel = decode.main_kernel(fmt, 16, arch)
    missed = [
        call_sites(kernel, match.start())
        for which, match in enumerate(re.finditer(WAIT, kernel.ptx, re.MULTILINE))
        if outcome(mutant(kernel, WAIT, "\nsetp.eq.u32 p, 0, 0;", which), fmt, arch) == ""
    ]
    assert [place for place in missed if REDUNDANT[0] not in place] == []
    assert len(missed) <= 1


@pytest.mark.parametrize(("fmt", "arch"), KERNELS)
def test_every_removed_barrier_is_noticed(fmt: str, arch: str) -> None:
    kernel = decode.main_kernel(fmt, 16, arch)
    pattern = r"^\s*barrier\.sync [^;]*;"
    missed = [
        call_sites(kernel, match.start())
        for which, match in enumerate(re.finditer(pattern, kernel.ptx, re.MULTILINE))
        if outcome(mutant(kernel, pattern, "", which), fmt, arch) == ""
    ]
    assert [place for place in missed if REDUNDANT[1] not in place] == []
    assert len(missed) <= 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_every_removed_arrival_is_noticed(arch: str) -> None:
    kernel = decode.main_kernel("v32", 16, arch)
    pattern = r"^\s*(?:cp\.async\.)?mbarrier\.arrive[^;]*;"
    count = len(re.findall(pattern, kernel.ptx, re.MULTILINE))
    assert count >= 4
    found = [outcome(mutant(kernel, pattern, "", which), "v32", arch, range(1)) for which in range(count)]
    assert all(found)
    # Whoever waits for it waits for good.
    told = [text for text in found if "deadlock" in text]
    assert told
    for text in told:
        assert re.search(r"warp \d+, lanes 0x\w+: wait for parity \d of the mbarrier at shared byte \d+ \(", text)
