"""The indexer's scores of candidate blocks on the emulator: formats, windows, faults that are noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from indexer import EmulatedBlocks, blocks_problem, blocks_spec, compiled
from planted import faulty

from dsagen.check.block_cases import BlockCase
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile

# Rings that go round and copies of words, windows that end within a block, and values of all kinds.
LONG = BlockCase("long", LogitsCase("", 2, 3, 610, 61, 4, lengths=Lengths.PER_REQUEST))
EDGES = BlockCase("edges", LogitsCase("", 9, 1, 132, lengths=Lengths.EDGES, unscored=63, wild=True, page_size=5))
SPECIAL = BlockCase("special", LogitsCase("", 3, 2, 200, contents=Contents.SPECIAL, strided=True))
MANY = BlockCase("many", LogitsCase("", 300, 1, 70))


def indexer(arch: str, seed: int = 0, **changes: object) -> EmulatedBlocks:
    spec = blocks_spec(arch, **changes)  # type: ignore[arg-type]
    return EmulatedBlocks(spec, compiled(spec), seed, "random" if seed else None)


@pytest.mark.parametrize(
    ("arch", "keys", "dim", "scores"), [("sm_80", "fp8", 32, "bf16"), ("sm_90a", "mxfp4", 128, "fp32")]
)
def test_kernels_of_some_formats(arch: str, keys: str, dim: int, scores: str) -> None:
    kernel = indexer(arch, seed=dim, keys=keys, dim=dim, scores=scores)
    for case in (LONG, EDGES, SPECIAL, MANY):
        assert blocks_problem(case, kernel) == "", case.name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Keys of other blocks, keys past the length and on no page, blocks that are not seen.
        ("distance = 4; distance < 32;", "distance = 1; distance < 8;"),
        ("key < end && keys.held[i] ? own[i]", "true ? own[i]"),
        ("if (lane < 4 && key < end) blocks", "if (lane < 4) blocks"),
        # The block behind the newest, and counts that leave out the last keys.
        ("block == (end - 1) / kBlockKeys", "block == end / kBlockKeys"),
        ("(Units::columns(p, row).end + kBlockKeys - 1)", "(Units::columns(p, row).end)"),
    ],
)
def test_faults_are_noticed(old: str, new: str) -> None:
    right = indexer("sm_80", seed=32, dim=32)
    wrong = replace(right, kernel=faulty(right.kernel, old, new))
    assert any(complaint(case, wrong) for case in (EDGES, SPECIAL))


def complaint(case: BlockCase, kernel: EmulatedBlocks) -> str:
    try:
        return blocks_problem(case, kernel)
    except EmulatorError as error:
        return str(error)
