"""The indexer over keys in one piece on the emulator: golden data, formats, widths, faults that are noticed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from indexer import EmulatedRagged, compiled, ragged_problem, ragged_spec
from planted import a_race, faulty, said

from dsagen.check.indexer_cases import Contents
from dsagen.check.ragged_cases import RaggedCase, Windows
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
# Rings that go round and windows that jump; then short windows in compressed rows, and tensors with gaps.
PROMPTS = RaggedCase("prompts", 13, 900, windows=Windows.PROMPTS, fill=True, key_gap=16)
EDGES = RaggedCase("edges", 19, 300, 140, windows=Windows.EDGES, strided=True, unscored=1, key_gap=4)
BEYOND = RaggedCase("beyond", 19, 200, 90, windows=Windows.BEYOND, fill=True)


def indexer(arch: str, seed: int = 0, **changes: object) -> EmulatedRagged:
    spec = ragged_spec(arch, **changes)  # type: ignore[arg-type]
    return EmulatedRagged(spec, compiled(spec), seed, "random" if seed else None)


@pytest.mark.parametrize(
    ("arch", "keys", "dim", "scores"),
    [("sm_80", "fp8", 32, "bf16"), ("sm_90a", "fp8", 128, "fp32"), ("sm_90a", "mxfp4", 128, "fp32"),
     ("sm_90a", "mxfp8", 64, "bf16"), ("sm_120a", "mxfp4", 64, "fp32")],
)  # fmt: skip
def test_kernels_of_every_format(arch: str, keys: str, dim: int, scores: str) -> None:
    kernel = indexer(arch, seed=dim, keys=keys, dim=dim, scores=scores)
    for case in (PROMPTS, EDGES, BEYOND, replace(EDGES, contents=Contents.NORMAL, windows=Windows.APART, fill=True)):
        assert ragged_problem(case, kernel) == "", case.name


def test_golden_logits_of_windows() -> None:
    with np.load(VECTORS / "indexer_ragged_fp8.npz") as data:
        names = ("q_e4m3", "k_e4m3", "k_scale_f32", "weights_f32", "k_start", "k_end")
        given, want = [torch.from_numpy(data[name]) for name in names], torch.from_numpy(data["logits_f64"])
    assert_golden(indexer("sm_90a", heads=32), given, want)


def test_golden_logits_of_windows_of_mxfp4_keys() -> None:
    with np.load(VECTORS / "indexer_ragged_mxfp4.npz") as data:
        q, keys, weights, starts, ends = (
            torch.from_numpy(data[name]) for name in ("q_fp4", "k_fp4", "weights_f32", "k_start", "k_end")
        )
        q_scales, scales = (torch.from_numpy(data[f"{name}_scale_ue8m0"]).view(torch.int32) for name in "qk")
        want = torch.from_numpy(data["logits_f64"])
    given = [q, keys, scales.squeeze(-1), weights, starts, ends]
    assert_golden(indexer("sm_90a", keys="mxfp4"), given, want, q_scales=q_scales.squeeze(-1))


def assert_golden(kernel: EmulatedRagged, given: list[torch.Tensor], want: torch.Tensor, **named: torch.Tensor) -> None:
    out = torch.full(want.shape, 5.0)
    options = {"max_window": None, "unscored_up_to": 0, "fill_neg_inf": True}
    kernel.indexer_logits_ragged(*given, out=out, **options, **named)  # type: ignore[arg-type]
    assert out.isneginf().equal(want.isneginf())
    finite = want.isfinite()
    assert float((out[finite].double() - want[finite]).abs().max()) < 1e-6 * float(want[finite].abs().max())
    # Compressed rows are the same scores, each row from its first key on.
    starts, ends = given[-2].long(), given[-1].long()
    most = int((ends - starts).max())
    packed = torch.full((len(want), most), 5.0)
    kernel.indexer_logits_ragged(*given, out=packed, **{**options, "max_window": most}, **named)  # type: ignore[arg-type]
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        assert packed[row, : end - start].equal(out[row, start:end])
        assert bool(packed[row, end - start :].isneginf().all())


CASE = RaggedCase("planted", 5, 600, windows=Windows.WHOLE)
FAR = 1 << 27  # bytes between keys


def test_keys_that_lie_far_apart() -> None:
    right = indexer("sm_90a")
    assert ragged_problem(CASE, replace(right, key_stride_bytes=FAR)) == ""
    in_32_bits = "static_cast<i32>(at * p.key_stride_bytes)"
    wrong = faulty(right.kernel, "at * p.key_stride_bytes", in_32_bits)
    assert ragged_problem(CASE, replace(right, kernel=wrong)) == ""
    found = said(lambda: ragged_problem(CASE, replace(right, kernel=wrong, key_stride_bytes=FAR)))
    assert re.search(r"read of \d+ bytes at global address", found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A window that is taken as it comes.
        ("stop < p.key_count ? (stop > 0", "true ? (stop > 0"),
        # A pass that begins with the first token's keys.
        ("all.begin = own.begin < all.begin ? own.begin : all.begin;", "if (i == 0) all.begin = own.begin;"),
        # Compressed rows that are not cut, scores before a window, and in columns of other rows.
        ("end = begin + static_cast<u32>(p.width);", "end = end;"),
        ("key >= window.begin && key < window.end", "key < window.end"),
        ("scores[key - origin]", "scores[key]"),
    ],
)
def test_faults_in_windows_are_noticed(old: str, new: str) -> None:
    right = indexer("sm_90a")
    wrong = replace(right, kernel=faulty(right.kernel, old, new))
    assert any(complaint(case, wrong) for case in (BEYOND, replace(BEYOND, max_window=None)))


def complaint(case: RaggedCase, kernel: EmulatedRagged) -> str:
    """What the check or the machine says."""
    try:
        return ragged_problem(case, kernel)
    except EmulatorError as error:
        return str(error)


def test_a_barrier_that_is_missing() -> None:
    behind = "#pragma unroll 1\n      for (u32 tile = warp; tile < span.tiles; "
    right = indexer("sm_90a")
    wrong = faulty(right.kernel, f"      ptx::block_sync();\n{behind}", behind)
    assert a_race(said(lambda: ragged_problem(CASE, replace(right, kernel=wrong))), r"shared bytes \d+ to \d+")
