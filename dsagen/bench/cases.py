"""The benchmark's case list, as data."""

from __future__ import annotations

from dsagen.bench.data import BENCH_FORMATS, DecodeCase
from dsagen.errors import SpecError
from dsagen.spec import DeploymentSpec

BATCHES = (1, 4, 16, 64, 128)
S_Q = 1
TOPK = 2048
KV_TOKENS = 32 << 10
PAGE_SIZE = 64


def decode_cases(spec: DeploymentSpec) -> list[DecodeCase]:
    """A sparse-decode deployment at each batch: 32K tokens a sequence, one query token, its top-k up to 2048.

    SpecError for a KV format that no benchmark data is drawn for.
    """
    if spec.kv.format_id not in BENCH_FORMATS:
        raise SpecError(
            f"{spec.name}: no benchmark data for KV format {spec.kv.format_id}; there is for {', '.join(BENCH_FORMATS)}"
        )
    return [
        DecodeCase(
            kv_format=spec.kv.format_id,
            heads=spec.heads,
            batch=batch,
            s_q=S_Q,
            topk=min(TOPK, spec.topk),
            kv_tokens=KV_TOKENS,
            page_size=PAGE_SIZE,
        )
        for batch in BATCHES
    ]
