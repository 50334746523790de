"""The hopper body over keys in one piece, as nvcc emits it: right for every width, in every order of warps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decode import Kernel
from indexer import EmulatedRagged, hopper_kernel, ragged_problem, ragged_spec
from planted import faulty, said
from ptx_texts import ptx_of

from dsagen.check.indexer_cases import Contents
from dsagen.check.ragged_cases import RaggedCase, Windows
from dsagen.check.ragged_run import RaggedRun
from dsagen.emulator import DEVICE
from dsagen.errors import EmulatorError
from dsagen.families.indexer_logits.hopper_ragged import plan_hopper_ragged, preferred_geometry
from dsagen.runtime.api import load
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.runtime.indexer_ragged import FORM as RAGGED_FORM

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
# A ring that goes round and windows that jump; then short windows in compressed rows, gaps, and copies of words.
PROMPTS = RaggedCase("prompts", 13, 1500, windows=Windows.PROMPTS, fill=True, key_gap=16)
EDGES = RaggedCase("edges", 19, 300, 140, windows=Windows.EDGES, strided=True, unscored=1, key_gap=4)
BEYOND = RaggedCase("beyond", 19, 200, 90, windows=Windows.BEYOND, fill=True)
APART = RaggedCase("apart", 19, 300, windows=Windows.APART, contents=Contents.NAN_KEYS)
NORMAL = RaggedCase("normal", 11, 700, contents=Contents.NORMAL, short_sums=True)
# Dims, heads and scores: 40 heads leave columns over and an odd number of tokens, 72 are one token's in a product.
SHAPES = ((128, 64, "fp32"), (32, 8, "bf16"), (64, 40, "fp32"), (128, 72, "bf16"))


def indexer(heads: int = 64, dim: int = 128, scores: str = "fp32", seed: int = 0, sms: int = 1) -> EmulatedRagged:
    kernel = hopper_kernel(heads, dim, scores, "ragged")
    return EmulatedRagged(ragged_spec("sm_90a", heads, dim, scores), kernel, seed, "random" if seed else None, sms)


@pytest.mark.parametrize(("dim", "heads", "scores"), SHAPES)
def test_it_is_held_to_the_reference(dim: int, heads: int, scores: str) -> None:
    kernel = indexer(heads, dim, scores, seed=heads)
    drawn = (NORMAL, replace(NORMAL, contents=Contents.LARGE), replace(NORMAL, contents=Contents.SPECIAL))
    for case in (PROMPTS, EDGES, BEYOND, APART, *drawn):
        assert ragged_problem(case, kernel) == "", case.name


def test_golden_logits_of_windows() -> None:
    with np.load(VECTORS / "indexer_ragged_fp8.npz") as data:
        names = ("q_e4m3", "k_e4m3", "k_scale_f32", "weights_f32", "k_start", "k_end")
        given, want = [torch.from_numpy(data[name]) for name in names], torch.from_numpy(data["logits_f64"])
    out = torch.full(want.shape, 5.0)
    options = {"max_window": None, "unscored_up_to": 0, "fill_neg_inf": True}
    indexer(heads=32).indexer_logits_ragged(*given, out=out, **options)  # type: ignore[arg-type]
    assert out.isneginf().equal(want.isneginf())
    finite = want.isfinite()
    assert float((out[finite].double() - want[finite]).abs().max()) < 2.0**-10 * float(want[finite].abs().max())


def scores_of(case: RaggedCase, kernel: EmulatedRagged) -> torch.Tensor:
    """What a call of the case gives, bits of it, and what it leaves in place."""
    run = RaggedRun(case, lambda _: kernel, torch.device("cpu"), 7)
    outputs = run.outputs(kernel)
    run.call(kernel, run.inputs(kernel), outputs.view)
    return outputs.view.contiguous().view(torch.int32)


def test_scores_depend_on_neither_schedule_nor_number_of_sms() -> None:
    first = scores_of(NORMAL, indexer())
    for seed, schedule, sms in ((1, "random", 1), (2, "priorities", 2), (3, "random", 10)):
        assert scores_of(NORMAL, replace(indexer(seed=seed, sms=sms), schedule=schedule)).equal(first)


def test_what_is_measured_beside_it_gives_the_same_bits() -> None:
    right = indexer()
    changed = replace(preferred_geometry(128, 64), takes_turns=False, stages=3, ahead=1, added_of=2)
    plan = plan_hopper_ragged(right.kernel.plan.variant, changed)
    other = replace(right, kernel=Kernel(plan, ptx_of(plan)), seed=1, schedule="random")
    assert scores_of(NORMAL, other).equal(scores_of(NORMAL, right))


def test_accesses_of_shared_memory_meet_in_no_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSAGEN_INDEXER_LOGITS_BODY", "hopper")
    launches: list[EmulatedLaunch] = []
    options = EmulatorOptions(races=False, counters=True, observe=launches.append)
    kernels = load(ragged_spec("sm_90a", 64), device=DEVICE, emulator=options)
    RaggedRun(RaggedCase("counters", 12, 512, windows=Windows.WHOLE), lambda _: kernels, torch.device("cpu"), 7).run()
    (launch,) = launches
    counters = launch.counts.measured
    assert counters is not None and "hopper" in launch.symbol
    assert (counters.shared_read_conflicts, counters.shared_written_conflicts) == (0, 0)
    # Units of 8 tokens, of which the second has two groups that see nothing; of 64 keys a product a step of 32 dims.
    assert counters.instructions["tensor"] == (4 + 2) * 8 * 4


# ---- planted faults -------------------------------------------------------------------------------------------------

FAR = 1 << 27  # bytes between keys


def complaint(case: RaggedCase, kernel: EmulatedRagged) -> str:
    """What the check or the machine says."""
    try:
        return ragged_problem(case, kernel)
    except EmulatorError as error:
        return str(error)


def test_keys_that_lie_far_apart() -> None:
    case, right = RaggedCase("planted", 5, 600, windows=Windows.WHOLE), indexer()
    assert ragged_problem(case, replace(right, key_stride_bytes=FAR)) == ""
    wrong = faulty(
        right.kernel,
        "static_cast<i64>(key < end ? key : end - 1) * p.key_stride_bytes",
        "static_cast<i32>((key < end ? key : end - 1) * static_cast<u32>(p.key_stride_bytes))",
    )
    assert ragged_problem(case, replace(right, kernel=wrong)) == ""
    found = said(lambda: ragged_problem(case, replace(right, kernel=wrong, key_stride_bytes=FAR)))
    assert re.search(r"read of \d+ bytes at global address", found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Scores before a window, in columns of other rows, and of tokens that there are not.
        ("if (key - window.x >= window.y) continue;", "if (key >= window.x + window.y) continue;"),
        ("- static_cast<i64>(RaggedUnit::origin(p, window))", ""),
        ("if (pair + 1 >= kQueries && token > pair) continue;", ""),
        # Keys that one of a group's tokens sees and are passed over, and those behind the last one.
        ("seen.end = window.x + window.y > seen.end ? ", "seen.end = window.y != 0 ? "),
        ("ptx::copy_async_16(at, from, key < end ? 16 : 0);",
         "ptx::copy_async_16(at, source + static_cast<i64>(key) * p.key_stride_bytes, 16);"),
    ],
)  # fmt: skip
def test_faults_are_noticed(old: str, new: str) -> None:
    right = indexer(40, 64)
    wrong = replace(right, kernel=faulty(right.kernel, old, new))
    cases = (BEYOND, replace(BEYOND, max_window=None), EDGES, PROMPTS)
    assert any(complaint(case, wrong) for case in cases)


def test_nothing_is_touched_before_the_grid_before_has_ended() -> None:
    case, right = RaggedCase("planted", 5, 200, windows=Windows.WHOLE), indexer()
    before = tuple(name for name in map(str, RAGGED_FORM.addresses.values()) if name != "q_scales")
    wrong = faulty(right.kernel, "    ptx::grid_dependency_wait();\n", "")
    for name in before:
        early = rf"buffer {name}, which the grid before writes, ahead of griddepcontrol\.wait"
        assert re.search(early, complaint(case, replace(right, kernel=wrong, written_before=(name,))))
