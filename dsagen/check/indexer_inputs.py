"""Inputs for checks of the indexer's logits: pools full of NaN but for the keys that tokens see, tensors with gaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.check.indexer_cases import EDGES, Contents, Lengths, LogitsCase
from dsagen.families.indexer_logits.reference import limits_reference
from dsagen.index_format import IndexFormat
from dsagen.spec import IndexSpec

# Pages that no table names, and columns of tables behind the longest row.
_SPARE_PAGES, _SPARE_COLUMNS = 3, 2
_LARGEST = 448.0


@dataclass(frozen=True)
class LogitsInputs:
    """Tensors of one call."""

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All of them, in the order of the op's arguments."""
        return self.q, self.k_cache, self.weights, self.context_lens, self.block_table

    def copy_from(self, other: LogitsInputs) -> None:
        """Take another's contents, in place."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            _whole(mine).copy_(_whole(theirs))

    def request(self, index: int) -> LogitsInputs:
        """The tensors of one request, in the same memory."""
        next_n, one = self.q.shape[1], slice(index, index + 1)
        rows = slice(index * next_n, (index + 1) * next_n)
        return LogitsInputs(
            self.q[one], self.k_cache, self.weights[rows], self.context_lens[one], self.block_table[one]
        )


def make_inputs(case: LogitsCase, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> LogitsInputs:
    """Inputs of a case for an indexer of `index.dim`, on the generator's device."""
    heads = case.heads or index.heads
    lens = _lengths(case, generator)
    columns = -(-case.width // case.page_size)
    limits = limits_reference(lens, case.batch, case.next_n, case.width).amax(1)
    pool, table = _pool(case, record, index.dim, limits, columns, generator)
    gap = 1 if case.strided else 0
    q = _codes(case, (case.batch, case.next_n + gap, heads, index.dim + 16 * gap), generator)
    weights = _weights(case, (case.batch * case.next_n, heads + 3 * gap), generator)
    return LogitsInputs(
        q[:, : case.next_n, :, : index.dim].view(torch.float8_e4m3fn), pool, weights[:, :heads], lens, table
    )


def _lengths(case: LogitsCase, generator: torch.Generator) -> Tensor:
    device, width = generator.device, case.width
    shape = (case.batch,) if case.lengths is Lengths.PER_REQUEST else (case.batch, case.next_n)

    def drawn(low: int, high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, size, device=device, generator=generator, dtype=torch.int32)

    match case.lengths:
        case Lengths.STRIDED:
            wide = drawn(0, width + 1, (2 * case.batch, 3 * case.next_n))
            return wide[::2, 1::3]
        case Lengths.EDGES:
            edges = torch.tensor(EDGES, dtype=torch.int32, device=device).clamp(max=width)
            return edges.repeat(-(-case.rows // len(EDGES)))[: case.rows].view(shape)
        case Lengths.BEYOND:
            return drawn(-width, 3 * width, shape)
        case Lengths.EMPTY:
            return drawn(-5, 1, shape)
        case Lengths.ONE_LONG:
            lens = torch.zeros(shape, dtype=torch.int32, device=device)
            lens[-1] = width
            return lens
        case Lengths.WHOLE:
            return torch.full(shape, width, dtype=torch.int32, device=device)
        case _:
            lens = drawn(0, width + 1, shape)
            lens.view(-1)[-1] = width
            return lens


def _pool(
    case: LogitsCase, record: IndexFormat, dim: int, limits: Tensor, columns: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(cache, block table): every byte NaN but those of keys below a request's limit, on pages in random order."""
    device, page_size = generator.device, case.page_size
    keys = [int(n) for n in limits.tolist()]
    # As many as the longest lengths would need, so that a captured call has one shape.
    pages = case.batch * columns + _SPARE_PAGES
    record_bytes = record.record_bytes(dim)
    stride = record.page_bytes(dim, page_size) + case.pad_bytes
    pool = torch.empty((pages, stride), dtype=torch.uint8, device=device)
    pool[0::2], pool[1::2] = 0xFF, 0x7F
    order = torch.randperm(pages, device=device, generator=generator)
    wide = torch.full((case.batch, columns + _SPARE_COLUMNS), 1 << 30, dtype=torch.int32, device=device)
    wide[:, ::2] = -7
    flat = pool.view(-1)
    for request, count in enumerate(keys):
        taken = -(-count // page_size)
        own = order[request * columns : request * columns + taken]
        wide[request, :taken] = own.to(torch.int32)
        position = torch.arange(count, device=device)
        page, offset = own[position // page_size], position % page_size
        values = _codes(case, (count, dim), generator)
        if case.contents is Contents.NAN_KEYS:
            values[::5, 3] = 0xFF
        start = page * stride
        flat[(start + offset * dim)[:, None] + torch.arange(dim, device=device)] = values
        scales = _scales(case, count, generator).view(torch.uint8).view(count, 4)
        flat[(start + page_size * dim + 4 * offset)[:, None] + torch.arange(4, device=device)] = scales
        if case.wild and taken:
            wide[request, torch.arange(request % 3, taken, 3, device=device)] = (-1, pages, 2**31 - 1)[request % 3]
    shape = (pages, page_size, 1, record_bytes)
    return pool.as_strided(shape, (stride, record_bytes, record_bytes, 1)), wide


def _codes(case: LogitsCase, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """e4m3 bytes."""
    device = generator.device
    if case.contents is Contents.LARGE:
        codes = torch.randint(0, 255, shape, device=device, generator=generator, dtype=torch.uint8)
        return torch.where(codes & 0x7F == 0x7F, 0x7E, codes)
    if case.contents is Contents.NORMAL:
        x = torch.randn(shape, device=device, generator=generator) * 100.0
    else:
        x = torch.randint(-4, 5, shape, device=device, generator=generator).float()
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _scales(case: LogitsCase, count: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    powers = torch.randint(-1, 2, (count,), device=device, generator=generator).float().exp2()
    if case.contents is Contents.NORMAL:
        return powers * (0.5 + torch.rand(count, device=device, generator=generator)) / _LARGEST
    if case.contents is Contents.LARGE:
        return powers.pow(20.0)
    if case.contents is Contents.SPECIAL:
        powers[::7], powers[3::11] = torch.nan, torch.inf
    return powers


def _weights(case: LogitsCase, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    device = generator.device
    if case.contents is Contents.NORMAL:
        return torch.randn(shape, device=device, generator=generator)
    weights = torch.randint(-3, 4, shape, device=device, generator=generator).float()
    if case.contents is Contents.LARGE:
        return weights * torch.randint(-20, 20, shape, device=device, generator=generator).float().exp2()
    if case.contents is Contents.SPECIAL:
        weights[::3, 1], weights[1::3, 2] = torch.nan, -torch.inf
    return weights


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
