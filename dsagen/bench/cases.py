"""The benchmark's case list, as data."""

from __future__ import annotations

from collections.abc import Sequence

from dsagen.bench.data import BENCH_FORMATS, DecodeCase
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.errors import SpecError
from dsagen.spec import DeploymentSpec

BATCHES = (1, 4, 16, 64, 128)
S_Q = 1
TOPK = 2048
KV_TOKENS = 32 << 10
PAGE_SIZE = 64

# Rows and widths of top-k. The first of each dtype have a goal in topk_figures.
TOPK_SHAPES = {
    "fp32": (
        (1, 32 << 10),
        (128, 32 << 10),
        (64, 128 << 10),
        (128, 128 << 10),
        (4096, 32 << 10),
        (1, 128 << 10),
        (16, 128 << 10),
    ),
    "bf16": ((128, 32 << 10), (128, 128 << 10), (1, 128 << 10), (16, 128 << 10)),
}
TOPK_SLOTS = 2048
# Fewer slots, in the default mode only.
FEWER_SLOTS = (512, 1024)
FEWER_SLOTS_SHAPES = ((128, 32 << 10), (1, 128 << 10), (16, 128 << 10))


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


def topk_cases(spec: DeploymentSpec, score: str, modes: Sequence[str]) -> list[TopkBenchCase]:
    """Selections from scores of one dtype, in every mode that is offered; slots as far as the spec's capacity goes.

    `modes` are weakest first. What fewer slots cost is measured in one of them: `set` where there is one, the default.
    """
    capacity = spec.selected_topk
    default = "set" if "set" in modes else modes[-1]
    slots = min(TOPK_SLOTS, capacity)
    cases = [TopkBenchCase(score, *shape, slots, mode) for shape in TOPK_SHAPES[score] for mode in modes]
    fewer = [k for k in FEWER_SLOTS if k < slots]
    return cases + [TopkBenchCase(score, *shape, k, default) for k in fewer for shape in FEWER_SLOTS_SHAPES]
