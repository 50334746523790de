"""Cases and inputs of benchmarks of the indexer's logits: keys in shuffled pages, or in one piece under a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.errors import SpecError
from dsagen.index_format import IndexFormat, index_format

SCORE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class LogitsBenchCase:
    """One shape: `batch` requests of `next_n` tokens over `kv_tokens` keys each.

    `form` paged: every token sees all keys of its request, in pages of `page_size`. Ragged: one request, whose
    `next_n` tokens are the last of its `kv_tokens`, so that token t sees kv_tokens - next_n + t + 1 keys; rows of
    scores are `compressed`, or have a column for each key. SpecError for a shape that cannot be drawn.
    """

    form: str
    keys: str
    heads: int
    dim: int
    score: str
    batch: int
    next_n: int
    kv_tokens: int
    page_size: int = 64
    compressed: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "batch", "next_n", "kv_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_tokens % self.page_size:
            raise SpecError(f"kv_tokens {self.kv_tokens} do not fill pages of {self.page_size}: use a multiple")
        if self.form == "ragged" and (self.batch != 1 or self.next_n > self.kv_tokens):
            raise SpecError(
                f"ragged case of {self.batch} requests, {self.next_n} tokens over {self.kv_tokens} keys: one request, "
                "with no more tokens than keys, is drawn"
            )

    @property
    def record(self) -> IndexFormat:
        """The keys' format."""
        return index_format(self.keys)

    @property
    def pairs(self) -> int:
        """Scores of one call."""
        if self.form == "paged":
            return self.batch * self.next_n * self.kv_tokens
        return self.next_n * (2 * self.kv_tokens - self.next_n + 1) // 2

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys of one call, each read once."""
        return self.batch * self.kv_tokens * self.record.record_bytes(self.dim)

    @property
    def write_bytes(self) -> int:
        """Bytes of its scores."""
        return self.pairs * SCORE_BYTES[self.score]

    @property
    def flops(self) -> int:
        """Floating-point operations of its products."""
        return 2 * self.pairs * self.heads * self.dim


@dataclass(frozen=True)
class LogitsBenchInputs:
    """One input set. `k_cache` and `block_table` are a paged case's, `keys`, `key_scales` and `starts` a ragged one's.

    `lengths` are [batch, next_n] of keys that tokens see, or [next_n] ends of their windows.
    """

    q: Tensor
    weights: Tensor
    lengths: Tensor
    k_cache: Tensor | None = None
    block_table: Tensor | None = None
    keys: Tensor | None = None
    key_scales: Tensor | None = None
    starts: Tensor | None = None
    q_scales: Tensor | None = None

    @property
    def named(self) -> dict[str, Tensor]:
        """Arguments that the format asks for."""
        return {} if self.q_scales is None else {"q_scales": self.q_scales}


def logits_inputs(
    case: LogitsBenchCase, sets: int, *, device: str | torch.device = "cuda", seed: int = 0
) -> list[LogitsBenchInputs]:
    """`sets` input sets of a case: keys of each are its own, all else is shared."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    draw = IndexDraw(case.record, case.dim, generator)
    shape = (case.batch, case.next_n, case.heads) if case.form == "paged" else (case.next_n, case.heads)
    q, q_scales = draw.codes(*shape), draw.words(*shape) if case.record.is_block_scaled else None
    weights = torch.randn(case.batch * case.next_n, case.heads, device=device, generator=generator)
    if case.form == "paged":
        lengths = torch.full((case.batch, case.next_n), case.kv_tokens, dtype=torch.int32, device=device)
        pages = case.kv_tokens // case.page_size
        order = torch.randperm(case.batch * pages, device=device, generator=generator).to(torch.int32)
        table = order.view(case.batch, pages)
        return [
            LogitsBenchInputs(
                q, weights, lengths, draw.pool(case.batch * pages, case.page_size), table, q_scales=q_scales
            )
            for _ in range(sets)
        ]
    first = case.kv_tokens - case.next_n + 1
    ends = torch.arange(first, case.kv_tokens + 1, dtype=torch.int32, device=device)
    starts = torch.zeros_like(ends)
    made = []
    for _ in range(sets):
        keys, scales = draw.codes(case.kv_tokens), draw.scales(case.kv_tokens)
        rest = {"keys": keys, "key_scales": scales, "starts": starts, "q_scales": q_scales}
        made.append(LogitsBenchInputs(q, weights, ends, **rest))
    return made


@dataclass(frozen=True)
class IndexDraw:
    """Random codes and scales of an index-key format, all of them numbers."""

    record: IndexFormat
    dim: int
    generator: torch.Generator

    def codes(self, *shape: int) -> Tensor:
        """Of values up to 1.875 (e4m3) or of any (e2m1)."""
        found = self._bytes(0, 256, (*shape, self.record.code_bytes(self.dim)))
        return (found & 0xBF).view(torch.float8_e4m3fn) if self.record.values.bits == 8 else found

    def words(self, *shape: int) -> Tensor:
        """Four ue8m0 each, of 2^-7 to 1."""
        return self._bytes(120, 128, (*shape, 4)).view(torch.int32).squeeze(-1)

    def scales(self, count: int) -> Tensor:
        """A word of scales of each key."""
        if self.record.is_block_scaled:
            return self.words(count)
        return torch.rand(count, device=self.device, generator=self.generator) + 0.5

    def pool(self, pages: int, page_size: int) -> Tensor:
        """uint8 [pages, page_size, 1, bytes of a key]."""
        record, dim = self.record, self.dim
        code_bytes = page_size * record.code_bytes(dim)
        pool = torch.empty(pages, record.page_bytes(dim, page_size), dtype=torch.uint8, device=self.device)
        pool[:, :code_bytes] = self.codes(pages, page_size).view(torch.uint8).view(pages, -1)
        pool[:, code_bytes:] = self.scales(pages * page_size).view(torch.uint8).view(pages, -1)
        return pool.view(pages, page_size, 1, record.record_bytes(dim))

    @property
    def device(self) -> torch.device:
        """Of the generator."""
        return self.generator.device

    def _bytes(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator)
