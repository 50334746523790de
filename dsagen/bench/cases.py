"""The benchmark's case list, as data."""

from __future__ import annotations

from collections.abc import Sequence

from dsagen.bench.data import DecodeCase
from dsagen.bench.logits_data import LogitsBenchCase
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.errors import SpecError
from dsagen.spec import DeploymentSpec

BATCHES = (1, 4, 16, 64, 128)
S_Q = 1
TOPK = 2048
# Columns of a window, and of a selection in a second cache.
WINDOW = 128
SELECTED = (512, 1024)
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

# Requests, tokens of each and keys of paged logits, and tokens over keys of ragged ones. Those of fp8 keys have goals.
PAGED_LOGITS = (
    (1, 1, 4 << 10),
    (1, 1, 128 << 10),
    (16, 1, 32 << 10),
    (128, 1, 32 << 10),
    (128, 1, 128 << 10),
    (128, 2, 128 << 10),
)
RAGGED_LOGITS = ((4096, 32 << 10),)
# Heads that ragged logits are measured with beside the spec's.
FEWER_HEADS = 32


def decode_cases(spec: DeploymentSpec) -> list[DecodeCase]:
    """A sparse-decode deployment at each batch: 32K tokens a sequence, one query token, its index rows.

    With a second cache that is a window and 512 (of large capacities also 1024) selected tokens; where the main
    cache's rows have room for a selection, also that alone. SpecError for several KV heads, and for values apart from
    keys: no pool of such is drawn here.
    """
    require_measurable(spec)
    return [
        DecodeCase(
            kv_format=spec.kv.format_id,
            heads=spec.heads,
            batch=batch,
            s_q=S_Q,
            topk=topk,
            kv_tokens=KV_TOKENS,
            page_size=PAGE_SIZE,
            extra_format=spec.extra_kv.format_id if extra_topk and spec.extra_kv else None,
            extra_topk=extra_topk or None,
        )
        for topk, extra_topk in decode_widths(spec)
        for batch in BATCHES
    ]


def require_measurable(spec: DeploymentSpec) -> None:
    """SpecError for a spec with sparse decode of which no pool is drawn here."""
    if spec.kv_heads > 1 or spec.kv_format.first_value:
        what = f"{spec.kv_heads} KV heads" if spec.kv_heads > 1 else f"format {spec.kv.format_id}"
        raise SpecError(f"{spec.name}: {what}: such calls are not measured, only checked: leave the spec out")


def decode_widths(spec: DeploymentSpec) -> list[tuple[int, int]]:
    """Columns of the index rows of both caches that are measured."""
    if not spec.extra_topk:
        return [(min(TOPK, spec.topk), 0)]
    window = min(WINDOW, spec.topk)
    widths = [(window, extra) for extra in SELECTED if extra <= spec.extra_topk] or [(window, spec.extra_topk)]
    return widths + ([(SELECTED[0], 0)] if spec.topk >= SELECTED[0] else [])


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


def logits_cases(spec: DeploymentSpec) -> list[LogitsBenchCase]:
    """The indexer's logits in each form that the spec has keys in; ragged ones also of fewer heads, and compressed."""
    index = spec.index
    assert index is not None and spec.scores is not None, "a spec with the op has an index and a score dtype"
    cases: list[LogitsBenchCase] = []
    if "paged" in index.forms:
        shape = ("paged", index.keys, index.heads, index.dim, spec.scores)
        cases += [LogitsBenchCase(*shape, *sizes) for sizes in PAGED_LOGITS]
    if "ragged" in index.forms:
        for heads in dict.fromkeys((index.heads, FEWER_HEADS)):
            shape = ("ragged", index.keys, heads, index.dim, spec.scores)
            cases += [LogitsBenchCase(*shape, 1, *sizes) for sizes in RAGGED_LOGITS]
        tokens, keys = RAGGED_LOGITS[0]
        shape = ("ragged", index.keys, index.heads, index.dim, spec.scores)
        cases.append(LogitsBenchCase(*shape, 1, tokens, keys, compressed=True))
    return cases
