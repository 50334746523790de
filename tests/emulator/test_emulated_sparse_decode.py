"""The sparse decode kernels, as nvcc emits them, give the same bits in every order of warps.

Their results are held to the reference by test_conformance_emulated.py, faults in them by test_mutations.py.
"""

from __future__ import annotations

from dataclasses import replace

import decode
import pytest

from dsagen.check.cases import DecodeCase, Lengths

pytestmark = pytest.mark.compile

SMALL = DecodeCase("small", batch=2, s_q=1, kv_tokens=150, topk=140, page_size=64)
WILD = replace(SMALL, lengths=Lengths.PER_REQUEST, wild_ids=True, sink=True, strided=True, padded_pages=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_results_do_not_depend_on_the_schedule(arch: str) -> None:
    case = replace(WILD, batch=1)
    first = decode.run(case, "v32", 16, arch)
    for seed in range(1, 6):
        again = decode.run(case, "v32", 16, arch, seed=seed)
        assert first.out.view(-1).equal(again.out.view(-1))
        assert first.lse.equal(again.lse)
