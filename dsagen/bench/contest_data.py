"""The contest's workloads, drawn to the shapes of the public inventory, and its rules of what is right.

Nothing of dsagen is in the references: keys and rows are unpacked here, in fp32 as the rules have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

K, PAGE, HEADS, DIM = 2048, 64, 64, 128
SM_SCALE = 0.1352337788608801
TOLERANCE = 1e-2
INDEXER_PAGES, ATTENTION_PAGES = 11923, 8462


@dataclass(frozen=True)
class IndexerWorkload:
    """Requests by their lengths; `max_num_pages` columns of the table, those behind a request's pages 0."""

    seq_lens: tuple[int, ...]
    max_num_pages: int
    contiguous: bool = False


@dataclass(frozen=True)
class AttentionWorkload:
    """Tokens by how many ids each has, at its front."""

    counts: tuple[int, ...]


def indexer_workloads() -> list[IndexerWorkload]:
    """128: 69 of up to 32 pages, 39 of 33 to 45, 20 of 82 to 91; of the latter one row each is longer than 2048."""
    draw = torch.Generator().manual_seed(2026)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    found = []
    for number in range(128):
        pages = integer(1, 32) if number < 69 else integer(33, 45) if number < 108 else integer(82, 91)
        longest = integer((pages - 1) * PAGE + 1, min(pages * PAGE, 5806))
        others = [integer(1, min(longest, K)) for _ in range(integer(0, 30))]
        lens = [*others, longest]
        order = torch.randperm(len(lens), generator=draw).tolist()
        found.append(
            IndexerWorkload(
                tuple(lens[i] for i in order), pages, contiguous=number >= 69 and (number - 69) * 17 % 59 < 17
            )
        )
    return found


def attention_workloads() -> list[AttentionWorkload]:
    """23 of 1 to 8 tokens, whose most ids go from 18 to 2048."""
    draw = torch.Generator().manual_seed(2027)
    found = []
    for number in range(23):
        tokens, most = (1, 2, 6, 7, 8)[number % 5], 18 + (K - 18) * number // 22
        counts = torch.randint(1, most + 1, (tokens,), generator=draw)
        counts[int(torch.randint(0, tokens, (1,), generator=draw))] = most
        found.append(AttentionWorkload(tuple(counts.tolist())))
    return found


def index_cache(pages: int, device: torch.device, seed: int = 0) -> Tensor:
    """A cache as the evaluator draws it: int8 [pages, 64, 1, 132], scales that are no powers of two."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn((pages, PAGE, DIM), device=device, generator=draw).bfloat16().float()
    scale = x.abs().amax(2, keepdim=True).clamp(min=1e-4) / 448
    cache = torch.empty(pages, PAGE * (DIM + 4), dtype=torch.uint8, device=device)
    cache[:, : PAGE * DIM] = (x * (1 / scale)).to(torch.float8_e4m3fn).view(torch.uint8).view(pages, -1)
    cache[:, PAGE * DIM :] = scale.view(torch.uint8).view(pages, -1)
    return cache.view(torch.int8).view(pages, PAGE, 1, DIM + 4)


def indexer_inputs(
    work: IndexerWorkload, pages: int, device: torch.device, seed: int = 0, cache: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The five inputs in their order, over a cache of so many pages, which is drawn unless given."""
    draw = torch.Generator(device).manual_seed(seed)
    batch = len(work.seq_lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=draw)

    q = normal(batch, HEADS, DIM).clamp(-2, 2).to(torch.float8_e4m3fn)
    if cache is None:
        cache = index_cache(pages, device, seed)
    lens = torch.tensor(work.seq_lens, dtype=torch.int32, device=device)
    table = torch.zeros(batch, work.max_num_pages, dtype=torch.int32, device=device)
    order = torch.arange(pages, device=device)
    if not work.contiguous:
        order = torch.randperm(pages, device=device, generator=draw)
    used = 0
    for row, length in enumerate(work.seq_lens):
        count = -(-length // PAGE)
        table[row, :count] = order[torch.arange(used, used + count, device=device) % pages].int()
        used += count
    return q, cache, normal(batch, HEADS), lens, table


def indexer_problem(inputs: tuple[Tensor, ...], found: Tensor) -> str:
    """What the rules find wrong with ids [batch, 2048]; empty when nothing is."""
    q, cache, weights, lens, table = inputs
    if (tuple(found.shape), found.dtype) != ((q.shape[0], K), torch.int32):
        return f"{found.dtype} {tuple(found.shape)}"
    for row in range(q.shape[0]):
        length = int(lens[row])
        scores = _scores(q[row], cache, weights[row], table[row], length)
        ids = found[row][found[row] >= 0].long()
        place = {int(page): position for position, page in enumerate(table[row, : -(-length // PAGE)].tolist())}
        positions = [
            place.get(page, -1) * PAGE + slot
            for page, slot in zip((ids // PAGE).tolist(), (ids % PAGE).tolist(), strict=True)
        ]
        if any(position < 0 or position >= length for position in positions):
            return f"row {row}: an id of no key of the row"
        if len(set(positions)) != len(positions):
            return f"row {row}: an id twice"
        if len(positions) != min(K, length):
            return f"row {row}: {len(positions)} ids of {min(K, length)}"
        own = scores[torch.tensor(positions, dtype=torch.int64, device=scores.device)].sort(descending=True).values
        best = scores.sort(descending=True).values[: len(positions)]
        if _mismatched(own, best):
            return f"row {row}: {_mismatched(own, best)} scores are not those of the best keys"
    return ""


def _scores(q: Tensor, cache: Tensor, weights: Tensor, table: Tensor, length: int) -> Tensor:
    """fp32 [length] scores of a row's keys."""
    if length < 1:
        return torch.empty(0, device=q.device)
    pages = table[: -(-length // PAGE)].long()
    flat = cache[pages].view(torch.uint8).reshape(len(pages), -1)
    codes = flat[:, : PAGE * DIM].contiguous().view(torch.float8_e4m3fn).float().view(-1, DIM)
    scales = flat[:, PAGE * DIM :].contiguous().view(torch.float32).view(-1)
    products = (q.float() @ (codes * scales[:, None]).T).relu()
    return (weights[:, None] * products).sum(0)[:length]


def attention_inputs(
    work: AttentionWorkload,
    pages: int,
    device: torch.device,
    seed: int = 0,
    caches: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The six inputs in their order, over caches of so many pages, which are drawn unless given."""
    draw = torch.Generator(device).manual_seed(seed)
    tokens = len(work.counts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=draw).bfloat16()

    ids = torch.full((tokens, K), -1, dtype=torch.int32, device=device)
    for row, count in enumerate(work.counts):
        ids[row, :count] = torch.randperm(pages * PAGE, device=device, generator=draw)[:count].int()
    if caches is None:
        caches = normal(pages, PAGE, 512), normal(pages, PAGE, 64)
    return normal(tokens, 16, 512), normal(tokens, 16, 64), *caches, ids, torch.tensor(SM_SCALE)


def attention_reference(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """fp32 (output, lse in base 2)."""
    q_nope, q_pe, ckv, kpe, ids, scale = inputs
    out = torch.zeros(q_nope.shape, dtype=torch.float32, device=q_nope.device)
    lse = torch.full(q_nope.shape[:2], -torch.inf, dtype=torch.float32, device=q_nope.device)
    for row in range(q_nope.shape[0]):
        own = ids[row][ids[row] >= 0].long()
        if not len(own):
            continue
        latent, rotary = ckv.view(-1, 512)[own].float(), kpe.view(-1, 64)[own].float()
        logits = (q_nope[row].float() @ latent.T + q_pe[row].float() @ rotary.T) * float(scale)
        lse[row] = logits.logsumexp(1) / torch.log(torch.tensor(2.0))
        out[row] = logits.softmax(1) @ latent
    return out, lse


def attention_problem(inputs: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> str:
    """What the rules find wrong with one or two outputs; empty when nothing is."""
    for name, want, got in zip(("output", "lse"), attention_reference(inputs), found, strict=False):
        if got.shape != want.shape:
            return f"{name}: {tuple(got.shape)}"
        if not bool(got.isfinite().all()):
            return f"{name}: infinite or NaN"
        if _mismatched(got.float(), want):
            return f"{name}: {_mismatched(got.float(), want)} elements off"
    return ""


def _mismatched(found: Tensor, want: Tensor) -> int:
    error = (found - want).abs()
    return int(((error > TOLERANCE) & (error / (want.abs() + 1e-8) > TOLERANCE)).sum())
