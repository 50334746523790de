"""Cases and inputs of decode-step benchmarks: random index keys and rows, every request on pages of its own.

With a second cache the selection is from that one, and beside it each token attends to a window of the first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsagen.bench.data import KvPool, distinct_ids, make_pool
from dsagen.bench.logits_data import IndexDraw
from dsagen.errors import SpecError
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.index_format import index_format
from dsagen.kv_format import kv_format
from dsagen.spec import DeploymentSpec

# Requests of the case list, each with so many keys; and tokens of a page of both caches.
REQUESTS = (1, 16, 128)
CONTEXT, PAGE_SIZE, SELECTED = 128 << 10, 64, 2048
# Blocks of 8 keys that a layer of V4.1 chooses, and what layers do with them.
CANDIDATE_BLOCKS, CHOOSE, USE = 2048, "choose", "use"
# Tokens of a request's window, and of the cache that windows are in.
WINDOW, WINDOW_TOKENS = 128, 1 << 20
# Index keys drawn at once: 270 MB of codes.
_MOST_KEYS = 1 << 21
_SCORE_BYTES = {"fp32": 4, "bf16": 2}
# As the rows of the KV pool have it: softmaxes that are neither flat nor one-hot.
_Q_DEVIATION = 8.0


@dataclass(frozen=True)
class StepBenchCase:
    """One step: `next_n` tokens of each of `requests`, that see `context` keys each and attend to `selected` of them.

    These lie in rows of `kv_format`; with a `window`, so many rows of `window_format` are attended to as well.
    `page_size` is that of all caches. With `candidate_blocks` the layer `selects` inside of so many blocks of each
    token ("use"), or chooses them besides ("choose"). Raises SpecError for a shape that cannot be drawn.
    """

    kv_format: str
    heads: int
    index_heads: int
    index_dim: int
    index_keys: str
    scores: str
    requests: int
    next_n: int
    context: int
    selected: int
    page_size: int = PAGE_SIZE
    window: int = 0
    window_format: str | None = None
    selects: str | None = None
    candidate_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "next_n", "context", "selected", "page_size"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.context % self.page_size or self.selected >= self.context:
            raise SpecError(
                f"context {self.context}: must fill pages of {self.page_size}, and exceed the {self.selected} selected"
            )

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.requests * self.next_n

    @property
    def key_bytes(self) -> int:
        """Bytes of the index keys of one step, each read once a request, in candidate blocks once a token."""
        readers = self.rows if self.selects == USE else self.requests
        return readers * self.scored * index_format(self.index_keys).record_bytes(self.index_dim)

    @property
    def scored(self) -> int:
        """Keys that each token has scores of."""
        return min(BLOCK_KEYS * self.candidate_blocks, self.context) if self.selects == USE else self.context

    @property
    def read_bytes(self) -> int:
        """Bytes that no step can do without: index keys, and the selected rows of the KV cache, and the window's."""
        return self.key_bytes + self.rows * sum(count * kv_format(name).record_bytes for name, count in self.lists)

    @property
    def lists(self) -> tuple[tuple[str, int], ...]:
        """Format and columns of each list of a token."""
        selected = (self.kv_format, self.selected)
        return (selected,) if self.window_format is None else ((self.window_format, self.window), selected)

    @property
    def score_flops(self) -> int:
        """Floating-point operations of scores, two for each multiply-add of codes."""
        return 2 * self.rows * self.scored * self.index_heads * self.index_dim

    @property
    def attention_flops(self) -> int:
        """Likewise of attention, of 16-bit operands."""
        record = kv_format(self.kv_format)
        return 2 * self.rows * self.heads * (self.selected + self.window) * (record.d_qk + record.d_v)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what the case does not have."""
        return {name: value for name, value in asdict(self).items() if value not in (None, 0)}


@dataclass(frozen=True)
class StepBenchInputs:
    """One input set; caches are shared by all sets. Lengths are whole, tables name pages of the set's own requests.

    `k_cache_bf16` is the KvPool's, for libraries that read no other.
    """

    q: Tensor
    k_cache: Tensor
    index_q: Tensor
    index_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    k_cache_bf16: Tensor | None = None
    index_q_scales: Tensor | None = None
    window_cache: Tensor | None = None
    window_ids: Tensor | None = None

    @property
    def indexer(self) -> dict[str, Tensor]:
        """What selects, by the names of decode_step."""
        names = ("index_q", "index_cache", "weights", "context_lens", "block_table", "index_q_scales")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @property
    def caches(self) -> dict[str, Tensor]:
        """What is attended to, likewise: what is selected from is the second cache where there is a window."""
        if self.window_cache is None or self.window_ids is None:
            return {"k_cache": self.k_cache}
        return {"k_cache": self.window_cache, "extra_k_cache": self.k_cache, "indices": self.window_ids}


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: scores [tokens, columns], ids int32 [requests, next_n, selected], attention's out and lse.

    `blocks` are candidate blocks [tokens, slots], of whose keys the scores are where a layer uses them.
    """

    scores: Tensor
    ids: Tensor
    out: Tensor
    lse: Tensor | None
    blocks: Tensor | None = None


@dataclass(frozen=True)
class StepPools:
    """Index and KV cache, of as many pages, and a cache of windows where there is one."""

    index: Tensor
    kv: KvPool
    window: KvPool | None = None


def step_cases(spec: DeploymentSpec) -> list[StepBenchCase]:
    """A step at each number of requests, of each kind of layer that the spec's index has kernels for.

    SpecError for caches of several tensors or KV heads: none is drawn.
    """
    records = [record for record in (spec.kv_format, spec.extra_kv_format) if record is not None]
    if spec.kv_heads > 1 or any(len(record.tensors) > 1 for record in records):
        raise SpecError(
            f"{spec.name}: steps over caches of several KV heads or in several tensors are not measured, only checked"
        )
    assert spec.index is not None, "a spec with the op has an index"
    index = spec.index
    selected_from = spec.extra_kv or spec.kv
    case = StepBenchCase(
        selected_from.format_id, spec.heads, index.heads, index.dim, index.keys, str(spec.scores), 1, 1, CONTEXT,
        min(SELECTED, spec.selected_topk),
    )  # fmt: skip
    if spec.extra_kv is not None:
        case = replace(case, window=min(WINDOW, spec.topk), window_format=spec.kv.format_id)
    kinds = [case]
    if {"blocks", "candidates"} <= set(index.forms):
        blocks = min(CANDIDATE_BLOCKS, CONTEXT // BLOCK_KEYS)
        kinds += [replace(case, selects=selects, candidate_blocks=blocks) for selects in (CHOOSE, USE)]
    return [replace(kind, requests=requests) for requests in REQUESTS for kind in kinds]


def make_pools(
    case: StepBenchCase, requests: int, *, device: str | torch.device = "cuda", seed: int = 1, with_bf16: bool = False
) -> StepPools:
    """Caches with room for so many requests of the case, and a bf16 copy of the rows if asked for."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    record, dim, size = index_format(case.index_keys), case.index_dim, case.page_size
    pages = requests * case.context // size
    index = torch.empty(pages, record.page_bytes(dim, size), dtype=torch.uint8, device=device)
    step, draw = max(1, _MOST_KEYS // size), IndexDraw(record, dim, generator)
    for first in range(0, pages, step):
        part = index[first : first + step]
        part.copy_(draw.pool(len(part), size).view(len(part), -1))
    kv = make_pool(case.kv_format, requests * case.context, size, device=device, with_bf16=with_bf16)
    window = None
    if case.window_format is not None:
        tokens = max(WINDOW_TOKENS // size * size, -(-case.window // size) * size)
        window = make_pool(case.window_format, tokens, size, device=device, with_bf16=False)
    return StepPools(index.view(pages, size, 1, record.record_bytes(dim)), kv, window)


def step_inputs(case: StepBenchCase, pools: StepPools, sets: int, *, seed: int = 0) -> list[StepBenchInputs]:
    """`sets` input sets of a case; requests take the pools' pages in turn, each in random order."""
    device = pools.index.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    record, draw = index_format(case.index_keys), IndexDraw(index_format(case.index_keys), case.index_dim, generator)
    columns, regions = case.context // case.page_size, pools.index.shape[0] * case.page_size // case.context

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    found = []
    for number in range(sets):
        region = (torch.arange(case.requests, device=device) + number * case.requests) % regions
        order = torch.rand(case.requests, columns, device=device, generator=generator).argsort(1)
        table = (order + region[:, None] * columns).int()
        lens = torch.full((case.requests, case.next_n), case.context, dtype=torch.int32, device=device)
        heads = (case.requests, case.next_n, case.index_heads)
        window_ids = None
        if pools.window is not None:
            tokens = pools.window.k_cache.shape[0] * case.page_size
            window_ids = distinct_ids(case.rows, tokens, case.window, generator)
            window_ids = window_ids.int().view(case.requests, case.next_n, case.window)
        q = normal(case.requests, case.next_n, case.heads, kv_format(case.kv_format).d_qk) * _Q_DEVIATION
        found.append(
            StepBenchInputs(
                q.bfloat16(), pools.kv.k_cache, draw.codes(*heads), pools.index,
                normal(case.rows, case.index_heads), lens, table, pools.kv.k_cache_bf16,
                draw.words(*heads) if record.is_block_scaled else None,
                None if pools.window is None else pools.window.k_cache, window_ids,
            )
        )  # fmt: skip
    return found
