"""Cases and inputs of decode-step benchmarks: random index keys and rows, every request on pages of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dsagen.bench.data import KvPool, make_pool
from dsagen.errors import SpecError
from dsagen.index_format import index_format
from dsagen.kv_format import kv_format
from dsagen.spec import DeploymentSpec

# Requests of the case list, each with so many keys; and tokens of a page of both caches.
REQUESTS = (1, 16, 128)
CONTEXT, PAGE_SIZE, SELECTED = 128 << 10, 64, 2048
# Index keys drawn at once: 1 GB of fp32.
_MOST_KEYS = 1 << 21
_SCORE_BYTES = {"fp32": 4, "bf16": 2}
# As the rows of the KV pool have it: softmaxes that are neither flat nor one-hot.
_Q_DEVIATION = 8.0


@dataclass(frozen=True)
class StepBenchCase:
    """One step: `next_n` tokens of each of `requests`, that see `context` keys each and attend to `selected` of them.

    `page_size` is that of both caches. Raises SpecError for a shape that cannot be drawn.
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
        """Bytes of the index keys of one step, each read once a request."""
        return self.requests * self.context * index_format(self.index_keys).record_bytes(self.index_dim)

    @property
    def read_bytes(self) -> int:
        """Bytes that no step can do without: index keys, and the selected rows of the KV cache."""
        return self.key_bytes + self.rows * self.selected * kv_format(self.kv_format).record_bytes

    @property
    def score_flops(self) -> int:
        """Floating-point operations of scores, two for each multiply-add of codes."""
        return 2 * self.rows * self.context * self.index_heads * self.index_dim

    @property
    def attention_flops(self) -> int:
        """Likewise of attention, of 16-bit operands."""
        record = kv_format(self.kv_format)
        return 2 * self.rows * self.heads * self.selected * (record.d_qk + record.d_v)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


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

    @property
    def indexer(self) -> dict[str, Tensor]:
        """What selects, by the names of decode_step."""
        names = ("index_q", "index_cache", "weights", "context_lens", "block_table")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: scores [tokens, columns], ids int32 [requests, next_n, selected], attention's out and lse."""

    scores: Tensor
    ids: Tensor
    out: Tensor
    lse: Tensor | None


@dataclass(frozen=True)
class StepPools:
    """Both caches, of as many pages."""

    index: Tensor
    kv: KvPool


def step_cases(spec: DeploymentSpec) -> list[StepBenchCase]:
    """A step at each number of requests. SpecError for a second cache and for several KV heads: none are drawn here."""
    if spec.extra_kv is not None or spec.kv_heads > 1:
        raise SpecError(
            f"{spec.name}: steps of specs with a second cache or several KV heads are not measured, only checked"
        )
    assert spec.index is not None, "a spec with the op has an index"
    index = spec.index
    selected = min(SELECTED, spec.topk)
    return [
        StepBenchCase(
            spec.kv.format_id, spec.heads, index.heads, index.dim, index.keys, str(spec.scores), requests, 1, CONTEXT,
            selected,
        )
        for requests in REQUESTS
    ]  # fmt: skip


def make_pools(
    case: StepBenchCase, requests: int, *, device: str | torch.device = "cuda", seed: int = 1, with_bf16: bool = False
) -> StepPools:
    """Caches with room for so many requests of the case, and a bf16 copy of the rows if asked for."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    record, dim, size = index_format(case.index_keys), case.index_dim, case.page_size
    pages = requests * case.context // size
    index = torch.empty(pages, record.page_bytes(dim, size), dtype=torch.uint8, device=device)
    step = max(1, _MOST_KEYS // size)
    for first in range(0, pages, step):
        part = index[first : first + step]
        keys = torch.randn(len(part), size * dim, device=device, generator=generator).clamp_(-4, 4).mul_(100)
        part[:, : size * dim] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(len(part), size, device=device, generator=generator).add_(0.5).div_(448)
        part[:, size * dim :] = scales.view(torch.uint8)
    kv = make_pool(case.kv_format, requests * case.context, size, device=device, with_bf16=with_bf16)
    return StepPools(index.view(pages, size, 1, record.record_bytes(dim)), kv)


def step_inputs(case: StepBenchCase, pools: StepPools, sets: int, *, seed: int = 0) -> list[StepBenchInputs]:
    """`sets` input sets of a case; requests take the pools' pages in turn, each in random order."""
    device = pools.index.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    columns, regions = case.context // case.page_size, pools.index.shape[0] * case.page_size // case.context

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    found = []
    for number in range(sets):
        region = (torch.arange(case.requests, device=device) + number * case.requests) % regions
        order = torch.rand(case.requests, columns, device=device, generator=generator).argsort(1)
        table = (order + region[:, None] * columns).int()
        lens = torch.full((case.requests, case.next_n), case.context, dtype=torch.int32, device=device)
        index_q = (normal(case.requests, case.next_n, case.index_heads, case.index_dim) * 50).clamp(-448, 448)
        q = normal(case.requests, case.next_n, case.heads, kv_format(case.kv_format).d_qk) * _Q_DEVIATION
        found.append(
            StepBenchInputs(
                q.bfloat16(), pools.kv.k_cache, index_q.to(torch.float8_e4m3fn), pools.index,
                normal(case.rows, case.index_heads), lens, table, pools.kv.k_cache_bf16,
            )
        )  # fmt: skip
    return found
