"""The sparse decode kernels, as nvcc emits them, against their fp64 reference, and with faults planted in them."""

from __future__ import annotations

from dataclasses import replace

import decode
import pytest

from dsagen.check.cases import DecodeCase, Lengths, Values
from dsagen.emulator import coverage

pytestmark = pytest.mark.compile

SMALL = DecodeCase("small", batch=2, s_q=1, kv_tokens=150, topk=140, page_size=64)
WILD = replace(SMALL, lengths=Lengths.PER_REQUEST, wild_ids=True, sink=True, strided=True, padded_pages=True)
KERNELS = [("v32", "sm_90a"), ("v32", "sm_80"), ("bf16", "sm_90a"), ("bf16", "sm_80"), ("v32", "sm_100a")]


@pytest.mark.parametrize(("fmt", "arch"), KERNELS)
@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (SMALL, 1),
        (replace(WILD, page_size=61), 2),
        (replace(SMALL, s_q=2, lengths=Lengths.PER_TOKEN, empty_requests=True), 3),
        (replace(SMALL, values=Values.RAMP_UP), 1),
    ],
    ids=["plain", "wild", "empty", "ramp"],
)
def test_results(fmt: str, arch: str, case: DecodeCase, splits: int) -> None:
    assert decode.problem(case, fmt, decode.run(case, fmt, 16, arch, splits)) == ""


@pytest.mark.parametrize("heads", [8, 64])
def test_other_groups_of_heads(heads: int) -> None:
    assert decode.problem(SMALL, "v32", decode.run(SMALL, "v32", heads, "sm_90a")) == ""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_results_do_not_depend_on_the_schedule(arch: str) -> None:
    case = replace(WILD, batch=1)
    first = decode.run(case, "v32", 16, arch)
    for seed in range(1, 6):
        again = decode.run(case, "v32", 16, arch, seed=seed)
        assert first.out.view(-1).equal(again.out.view(-1))
        assert first.lse.equal(again.lse)


@pytest.mark.parametrize(("fmt", "arch"), KERNELS)
def test_every_instruction_is_there(fmt: str, arch: str) -> None:
    assert coverage(decode.main_kernel(fmt, 16, arch).ptx) == {}
    assert coverage(decode.combine_kernel(512, arch).ptx) == {}
