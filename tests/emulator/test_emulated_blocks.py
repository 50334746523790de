"""The indexer's scores of candidate blocks on the emulator: formats, windows, faults that are noticed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from indexer import EmulatedBlocks, blocks_problem, blocks_spec, compiled, hopper_kernel
from planted import faulty, said

from dsagen.check.block_cases import BlockCase
from dsagen.check.block_run import BlockRun
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile

# Rings that go round and copies of words, windows that end within a block, and values of all kinds.
LONG = BlockCase("long", LogitsCase("", 2, 3, 610, 61, 4, lengths=Lengths.PER_REQUEST))
EDGES = BlockCase("edges", LogitsCase("", 9, 1, 132, lengths=Lengths.EDGES, unscored=63, wild=True, page_size=5))
SPECIAL = BlockCase("special", LogitsCase("", 3, 2, 200, contents=Contents.SPECIAL, strided=True))
MANY = BlockCase("many", LogitsCase("", 300, 1, 70))
# Of the hopper body: pages of whole warps' keys, units of a few tokens, tiles of 32 and of 64 keys, keys that are NaN.
PAGES = BlockCase("pages", LogitsCase("", 2, 5, 600, 64, 16, lengths=Lengths.PER_REQUEST, wild=True))
FEW = BlockCase("few", LogitsCase("", 1, 3, 90, 32, 12, lengths=Lengths.PER_REQUEST, wild=True, unscored=20))
NAN_KEYS = BlockCase("nan_keys", LogitsCase("", 2, 2, 300, 61, contents=Contents.NAN_KEYS))
# Format, dim, heads and scores, the first as shipped. Of 128 heads a unit has two tokens; see MOST_QUERY_ROWS.
HOPPER = (("mxfp4", 128, 32, "fp32"), ("mxfp8", 64, 128, "bf16"), ("fp8", 32, 128, "fp32"))


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


def on_hopper(
    keys: str, dim: int = 128, heads: int = 32, scores: str = "fp32", sms: int = 1, seed: int = 1
) -> EmulatedBlocks:
    kernel = hopper_kernel(heads, dim, scores, "blocks", keys)
    return EmulatedBlocks(blocks_spec("sm_90a", dim, scores, keys, heads), kernel, seed, "random", sms)


@pytest.mark.parametrize(("keys", "dim", "heads", "scores"), HOPPER)
def test_the_hopper_body_of_some_formats(keys: str, dim: int, heads: int, scores: str) -> None:
    cases = [LONG, EDGES, SPECIAL, MANY, PAGES, FEW, *([NAN_KEYS] if keys != "mxfp4" else [])]
    for n, case in enumerate(cases):
        assert blocks_problem(case, on_hopper(keys, dim, heads, scores, 1 + n % 2, n)) == "", case.name
    for sms in (2, 3):
        assert blocks_problem(FEW, on_hopper(keys, dim, heads, scores, sms)) == "", sms


def results_of(case: BlockCase, kernel: EmulatedBlocks) -> list[torch.Tensor]:
    """Bits of what a call writes and of what it leaves in place."""
    run = BlockRun(case, lambda _: kernel, torch.device("cpu"), 7)
    outputs = run.outputs(kernel)
    run.call(kernel, run.inputs(kernel), outputs.view)
    ((scores, counts),) = run.blocks.values()
    return [tensor.view.contiguous().view(torch.int32) for tensor in (outputs, scores, counts)]


@pytest.mark.parametrize("contents", [Contents.INTEGER, Contents.SPECIAL])
def test_both_bodies_agree_to_the_bit_where_sums_are_exact(contents: Contents) -> None:
    """Blocks with NaN, infinities and keys on no page, of windows that end within one."""
    call = LogitsCase("", 3, 3, 333, 61, contents=contents, lengths=Lengths.PER_REQUEST, wild=True)
    case = BlockCase("both", call)
    portable = indexer("sm_90a", keys="mxfp4", dim=128, heads=32)
    for mine, theirs in zip(results_of(case, on_hopper("mxfp4")), results_of(case, portable), strict=True):
        assert mine.equal(theirs)


# Keys of other blocks and on no page, blocks that are not seen, the block behind the newest; scores of one token for
# another's, and rows of one request for another's.
HOPPER_FAULTS = (
    (
        "last.own.scale : kNegInf;\n#pragma unroll\n    for (int distance = 4; distance < 32;",
        "last.own.scale : kNegInf;\n#pragma unroll\n    for (int distance = 1; distance < 8;",
    ),
    ("largest = last.own.held ?", "largest = true ?"),
    ("last.key % kBlockKeys == 0 && last.key < keys", "last.key % kBlockKeys == 0"),
    ("block == (keys - 1) / kBlockKeys", "block == keys / kBlockKeys"),
    ("          epilogue.store(last, own);\n", "          epilogue.store(next, own);\n"),
    ("first_row(static_cast<u32>(Unit(params, unit).row(params, 0)))", "first_row(unit)"),
)
# Other tokens' rows, the last tile and tiles of few keys, and counts. Each is compiled: with --all-mutants only.
MORE_HOPPER_FAULTS = (
    ("(last.limit - first_limit) / 4) * p", "(last.limit - first_limit) / 8) * p"),
    ("    epilogue.store(last, own);\n  }\n", "  }\n"),
    ("        epilogue.store(next, own);\n", "        epilogue.store(next, 2 * own);\n"),
    ("(keys + kBlockKeys - 1) / kBlockKeys);\n    }", "keys / kBlockKeys);\n    }"),
    ("limit(p, static_cast<int>(row - request * next_n))", "limit(p, 0)"),
)


@pytest.mark.parametrize("turn", range(3))
def test_faults_of_the_hopper_body_are_noticed(turn: int, request: pytest.FixtureRequest) -> None:
    right = on_hopper("fp8", dim=32, heads=8)
    more = MORE_HOPPER_FAULTS if request.config.getoption("--all-mutants") else ()
    for old, new in (*HOPPER_FAULTS, *more)[turn::3]:
        wrong = replace(right, kernel=faulty(right.kernel, old, new))
        assert any(complaint(case, wrong) for case in (EDGES, SPECIAL, PAGES, FEW)), new


def test_blocks_are_counted_after_the_grid_before_has_ended() -> None:
    right = on_hopper("fp8", dim=32, heads=8)
    wait, count = "    ptx::grid_dependency_wait();\n", "    Score::Epilogue::begin(p, kThreads);\n"
    wrong = replace(right, kernel=faulty(right.kernel, count, "", wait, count + wait))
    for name in ("context_lens", "block_counts"):
        early = rf"buffer {name}, which the grid before writes, ahead of griddepcontrol\.wait"
        subject = replace(wrong, written_before=(name,))
        assert re.search(early, said(lambda subject=subject: blocks_problem(PAGES, subject)))


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
