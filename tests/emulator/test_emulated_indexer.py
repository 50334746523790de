"""The indexer's kernels on the emulator: golden data, every arch class and key width, and wrong ones noticed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from indexer import EmulatedIndexer, compiled, problem, spec_of

from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
# Rings that go round, units of several tokens, a last tile that few keys fill; then pages that start at 4 bytes.
TILES = LogitsCase("tiles", 2, 3, 1500, page_size=61, pad_bytes=12, lengths=Lengths.PER_REQUEST, fill=True)
WORDS = LogitsCase("words", 3, 2, 300, page_size=5, lengths=Lengths.STRIDED, strided=True, unscored=64, wild=True)


def indexer(arch: str, seed: int = 0, **changes: object) -> EmulatedIndexer:
    spec = spec_of(arch, **changes)  # type: ignore[arg-type]
    return EmulatedIndexer(spec, compiled(spec), seed, "random" if seed else None)


@pytest.mark.parametrize(("dim", "scores"), [(32, "fp32"), (64, "bf16"), (128, "fp32")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_kernels_of_every_arch_class_and_width(arch: str, dim: int, scores: str) -> None:
    kernel = indexer(arch, seed=dim, dim=dim, scores=scores)
    for case in (TILES, WORDS, replace(WORDS, contents=Contents.NORMAL, heads=16)):
        assert problem(case, kernel) == ""


@pytest.mark.parametrize(
    ("arch", "keys", "dim"),
    [("sm_80", "mxfp8", 64), ("sm_80", "mxfp4", 32), ("sm_90a", "mxfp8", 32), ("sm_90a", "mxfp8", 128),
     ("sm_90a", "mxfp4", 64), ("sm_90a", "mxfp4", 128)],
)  # fmt: skip
def test_kernels_of_block_scaled_keys(arch: str, keys: str, dim: int) -> None:
    kernel = indexer(arch, seed=dim, dim=dim, keys=keys)
    short = replace(TILES, width=700)
    for case in (short, replace(WORDS, contents=Contents.LARGE), replace(WORDS, contents=Contents.SPECIAL)):
        assert problem(case, kernel) == ""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_golden_logits_of_mxfp4_keys(arch: str) -> None:
    with np.load(VECTORS / "indexer_paged_mxfp4.npz") as data:
        pool, want = torch.from_numpy(data["pool"]), torch.from_numpy(data["logits_f64"])
        stride, page_size = int(data["page_stride_bytes"]), int(data["page_size"])
        cache = pool.as_strided((len(pool), page_size, 1, 68), (stride, 68, 68, 1))
        rest = [torch.from_numpy(data[name]) for name in ("weights_f32", "context_lens", "block_table")]
        q, scales = torch.from_numpy(data["q_fp4"]), torch.from_numpy(data["q_scale_ue8m0"]).view(torch.int32)
    out, options = torch.full(want.shape, 5.0), {"unscored_up_to": 0, "fill_neg_inf": True}
    kernel = indexer(arch, heads=64, keys="mxfp4")
    kernel.indexer_logits(q, cache, *rest, out=out, q_scales=scales.squeeze(-1), **options)
    assert_golden(out, want)


def assert_golden(out: torch.Tensor, want: torch.Tensor) -> None:
    assert out.isneginf().equal(want.isneginf())
    finite = want.isfinite()
    assert float((out[finite].double() - want[finite]).abs().max()) < 1e-6 * float(want[finite].abs().max())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_golden_logits(arch: str) -> None:
    with np.load(VECTORS / "indexer_paged_fp8.npz") as data:
        pool, want = torch.from_numpy(data["pool"]), torch.from_numpy(data["logits_f64"])
        stride, page_size = int(data["page_stride_bytes"]), int(data["page_size"])
        cache = pool.as_strided((len(pool), page_size, 1, 132), (stride, 132, 132, 1))
        rest = [torch.from_numpy(data[name]) for name in ("weights_f32", "context_lens", "block_table")]
        q = torch.from_numpy(data["q_e4m3"])
    out = torch.full(want.shape, 5.0)
    indexer(arch, heads=32).indexer_logits(q, cache, *rest, out=out, unscored_up_to=0, fill_neg_inf=True)
    assert_golden(out, want)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"max\.NaN\.f32", "min.NaN.f32"),  # relu of the other sign
        (r"cp\.async\.wait_group\s+\d+;", ""),  # tiles are taken before they land
        (r"bar\.warp\.sync[^;]*;", ""),
        (r"barrier\.sync\.aligned 0;", ""),
        (r"mul\.f32", "add.f32"),  # the scale
    ],
)
def test_a_wrong_kernel_is_noticed(pattern: str, replacement: str) -> None:
    right = indexer("sm_90a", seed=3)
    changed, count = re.subn(pattern, replacement, right.kernel.ptx)
    assert count
    try:
        found = problem(TILES, replace(right, kernel=replace(right.kernel, ptx=changed)))
    except EmulatorError as error:
        found = str(error)
    assert found
