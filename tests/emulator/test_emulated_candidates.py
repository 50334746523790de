"""The indexer in candidate blocks on the emulator: formats, lists, blocks, faults that are noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from indexer import EmulatedCandidates, candidates_problem, candidates_spec, compiled
from planted import faulty

from dsagen.check.candidate_cases import CandidateCase, Lists
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile

# Rings that go round; then blocks of 16 over pages of no multiple, copies of words, and any numbers in lists.
DRAWN = CandidateCase("drawn", LogitsCase("", 2, 2, 900, 64, 16, lengths=Lengths.PER_REQUEST), 101)
WILD = CandidateCase("wild", LogitsCase("", 3, 3, 300, 61, 4, strided=True, wild=True), 9, 16, Lists.WILD)
BEYOND = CandidateCase("beyond", LogitsCase("", 9, 1, 128, 5, lengths=Lengths.BEYOND), 20, lists=Lists.SORTED)
NORMAL = replace(DRAWN, call=replace(DRAWN.call, contents=Contents.NORMAL, lengths=Lengths.EDGES))


def indexer(arch: str, seed: int = 0, **changes: object) -> EmulatedCandidates:
    spec = candidates_spec(arch, **changes)  # type: ignore[arg-type]
    return EmulatedCandidates(spec, compiled(spec), seed, "random" if seed else None)


@pytest.mark.parametrize(
    ("arch", "keys", "dim", "scores"),
    [("sm_80", "fp8", 32, "bf16"), ("sm_90a", "fp8", 128, "fp32"), ("sm_90a", "mxfp4", 128, "fp32"),
     ("sm_120a", "mxfp8", 64, "bf16")],
)  # fmt: skip
def test_kernels_of_every_format(arch: str, keys: str, dim: int, scores: str) -> None:
    kernel = indexer(arch, seed=dim, keys=keys, dim=dim, scores=scores)
    for case in (DRAWN, WILD, BEYOND, NORMAL):
        assert candidates_problem(case, kernel) == "", case.name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Blocks of another tile, keys past the length, blocks that the token does not see, other tokens' lists.
        ("load_blocks(first + C::kWarps * C::kTileKeys, end);", "load_blocks(first + C::kTileKeys, end);"),
        ("block[i] < seen_blocks && key[i] < limit ?", "block[i] < seen_blocks ?"),
        ("block[i] < seen_blocks && key[i] < limit ?", "key[i] < limit ?"),
        ("unit.row(p, 0) * p.candidate_stride", "unit.request * p.candidate_stride"),
        ("limit = unit.limit(p, unit.first_token);", "limit = unit.limit(p, 0);"),
        # Tiles that are taken for empty, and a list that is read past its end.
        ("return ptx::ballot(has) != 0;", "return ptx::ballot(has) == 0xffffffffu;"),
        ("column < end ? ptx::load_global_4", "true ? ptx::load_global_4"),
    ],
)
def test_faults_in_lists_are_noticed(old: str, new: str) -> None:
    right = indexer("sm_90a")
    wrong = replace(right, kernel=faulty(right.kernel, old, new))
    assert any(complaint(case, wrong) for case in (WILD, BEYOND, DRAWN))


def complaint(case: CandidateCase, kernel: EmulatedCandidates) -> str:
    """What the check or the machine says."""
    try:
        return candidates_problem(case, kernel)
    except EmulatorError as error:
        return str(error)
