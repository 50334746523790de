"""Golden calls of sparse decode through the op on the emulator: bytes of public writers, lengths, sinks, two caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dsagen
from dsagen.check.compare import Gates, compare_decode
from dsagen.kv_format import KvFormat, kv_format

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
CALLS = {
    "decode_v32_p2": ("v32", None),
    "decode_v32_arbitrary_scales": ("v32", None),
    "decode_norope_allinvalid": ("v32_nope", None),
    "decode_v4_extra": ("v4", "v4"),
    "decode_v41_blocksplit_fp4": ("v41_page_split", "v41_fp4_page_split"),
    "decode_v41_interleaved_fp4": ("v41_interleaved", "v41_fp4_interleaved"),
}


def cache_of(record: KvFormat, data: Any, prefix: str) -> torch.Tensor:
    """The pool as the op takes it: [pages, page_size, 1, bytes], pages as far apart as in the file."""
    pool = torch.from_numpy(data[f"{prefix}pool"])
    page_size, size = int(data[f"{prefix}page_size"]), record.record_bytes
    return pool.as_strided((pool.shape[0], page_size, 1, size), (pool.stride(0), size, size, 1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CALLS)
def test_golden_call(name: str, arch: str) -> None:
    data = np.load(VECTORS / f"{name}.npz")
    kv, extra = CALLS[name]
    record = kv_format(kv)
    q = torch.from_numpy(data["q_bf16"]).view(torch.bfloat16)
    batch, s_q, heads, _ = q.shape
    spec = {
        "model": "custom",
        "heads": heads,
        "archs": [arch],
        "ops": ["sparse_decode"],
        "kv": kv,
        "topk": 64,
        "extra_kv": {"format": extra, "topk": 64} if extra else "none",
    }
    kernels = dsagen.load(spec, device="emulator")
    names = [n for n in ("attn_sink", "topk_length", "extra_indices", "extra_topk_length") if n in data]
    given = {n: torch.from_numpy(data[n]) for n in names}
    if extra:
        given["extra_k_cache"] = cache_of(kv_format(extra), data, "extra_")
    indices = torch.from_numpy(data["indices"])
    # One tile of each cache: in one split, or in one each.
    num_splits = 2 if extra and arch == "sm_80" else 1
    plan = kernels.plan_sparse_decode(batch, s_q, 64, extra_topk=64 if extra else 0, num_splits=num_splits)
    out, lse = kernels.sparse_decode(
        q, cache_of(record, data, ""), indices, plan=plan, softmax_scale=float(data["sm_scale"]), **given
    )
    want_out = torch.from_numpy(data["out_f32"]).double().flatten(0, 1)
    want_lse = torch.from_numpy(data["lse_f64"]).transpose(1, 2).flatten(0, 1)
    found = compare_decode(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), want_out, want_lse, 32, Gates())
    assert found.passed, found.problem
