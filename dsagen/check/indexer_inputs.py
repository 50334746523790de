"""Inputs for checks of the indexer's logits: pools full of NaN but for the keys that tokens see, tensors with gaps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.check.indexer_cases import EDGES, Contents, Lengths, LogitsCase
from dsagen.dtype import E2M1, E4M3
from dsagen.families.indexer_logits.reference import limits_reference
from dsagen.index_format import SCALE_WORD_BYTES, IndexFormat
from dsagen.spec import IndexSpec

# Pages that no table names, and columns of tables behind the longest row.
_SPARE_PAGES, _SPARE_COLUMNS = 3, 2
_LARGEST = 448.0
# Of scales of blocks where contents are large: products come back to where fp32 holds their sums.
_KEY_EXPONENT = 90


@dataclass(frozen=True)
class LogitsInputs:
    """Tensors of one call."""

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    q_scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Those that every call has, in the order of the op's arguments."""
        return self.q, self.k_cache, self.weights, self.context_lens, self.block_table

    @property
    def named(self) -> dict[str, Tensor]:
        """Those that the format asks for, by the names of the op's arguments."""
        return {} if self.q_scales is None else {"q_scales": self.q_scales}

    def copy_from(self, other: LogitsInputs) -> None:
        """Take another's contents, in place."""
        theirs = (*other.tensors, *other.named.values())
        for mine, new in zip((*self.tensors, *self.named.values()), theirs, strict=True):
            whole_storage(mine).copy_(whole_storage(new))

    def request(self, index: int) -> LogitsInputs:
        """The tensors of one request, in the same memory."""
        next_n, one = self.q.shape[1], slice(index, index + 1)
        rows = slice(index * next_n, (index + 1) * next_n)
        return LogitsInputs(
            self.q[one],
            self.k_cache,
            self.weights[rows],
            self.context_lens[one],
            self.block_table[one],
            None if self.q_scales is None else self.q_scales[one],
        )


def make_inputs(case: LogitsCase, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> LogitsInputs:
    """Inputs of a case for an indexer of `index.dim`, on the generator's device."""
    heads = case.heads or index.heads
    lens = _lengths(case, generator)
    columns = -(-case.width // case.page_size)
    limits = limits_reference(lens, case.batch, case.next_n, case.width).amax(1)
    pool, table = _pool(case, record, index.dim, limits, columns, generator)
    gap = 1 if case.strided else 0
    row_bytes = record.code_bytes(index.dim)
    q = codes_of(case.contents, record, (case.batch, case.next_n + gap, heads, row_bytes + 16 * gap), generator)
    scales = query_scales(case.contents, record, (case.batch, case.next_n + gap, heads + 3 * gap), index.dim, generator)
    weights = weights_of(case.contents, (case.batch * case.next_n, heads + 3 * gap), generator)
    return LogitsInputs(
        as_codes(record, q[:, : case.next_n, :, :row_bytes]),
        pool,
        weights[:, :heads],
        lens,
        table,
        None if scales is None else scales[:, : case.next_n, :heads],
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
    record_bytes, code_bytes = record.record_bytes(dim), record.code_bytes(dim)
    stride = record.page_bytes(dim, page_size) + case.pad_bytes
    pool = torch.empty((pages, stride), dtype=torch.uint8, device=device)
    # As a ue8m0 0x7F is 1.
    pool[0::2], pool[1::2] = 0xFF, 0xFF if record.is_block_scaled else 0x7F
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
        values = codes_of(case.contents, record, (count, code_bytes), generator)
        if case.contents is Contents.NAN_KEYS:
            values[::5, 3] = 0xFF
        start = page * stride
        flat[(start + offset * code_bytes)[:, None] + torch.arange(code_bytes, device=device)] = values
        scales = scales_of(case.contents, record, count, dim, generator).view(torch.uint8).view(count, 4)
        scale_at = start + record.scale_byte(dim, page_size, 0) + SCALE_WORD_BYTES * offset
        flat[scale_at[:, None] + torch.arange(SCALE_WORD_BYTES, device=device)] = scales
        if case.wild:
            wide[request, request % 3 : taken : 3] = (-1, pages, 2**31 - 1)[request % 3]
    shape = (pages, page_size, 1, record_bytes)
    return pool.as_strided(shape, (stride, record_bytes, record_bytes, 1)), wide


def as_codes(record: IndexFormat, codes: Tensor) -> Tensor:
    """Bytes as the dtype that carries the format's codes."""
    return codes.view(torch.float8_e4m3fn) if record.values is E4M3 else codes


def codes_of(contents: Contents, record: IndexFormat, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """uint8 codes of the format, the last size in bytes."""
    if record.values is E2M1:
        low, high = (_fp4_codes(contents, shape, generator) for _ in range(2))
        return low | high << 4
    device = generator.device
    if contents is Contents.LARGE:
        codes = torch.randint(0, 255, shape, device=device, generator=generator, dtype=torch.uint8)
        return torch.where(codes & 0x7F == 0x7F, 0x7E, codes)
    if contents is Contents.NORMAL:
        x = torch.randn(shape, device=device, generator=generator) * 100.0
    else:
        x = torch.randint(-4, 5, shape, device=device, generator=generator).float()
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _fp4_codes(contents: Contents, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    codes = torch.randint(0, 16, shape, device=generator.device, generator=generator, dtype=torch.uint8)
    if contents in (Contents.NORMAL, Contents.LARGE):
        return codes
    # Those of whole numbers up to 4: 0, 1, 2, 3 and 4.
    whole = torch.tensor((0, 2, 4, 5, 6, 2, 4, 5), dtype=torch.uint8, device=generator.device)
    return whole[(codes & 7).long()] | codes & 8


def scales_of(contents: Contents, record: IndexFormat, count: int, dim: int, generator: torch.Generator) -> Tensor:
    """[count] words of keys' scales: fp32, or four ue8m0 in an int32."""
    device = generator.device
    if record.is_block_scaled:
        return _scale_words(contents, record, (count,), dim, _KEY_EXPONENT, generator)
    powers = torch.randint(-1, 2, (count,), device=device, generator=generator).float().exp2()
    if contents is Contents.NORMAL:
        return powers * (0.5 + torch.rand(count, device=device, generator=generator)) / _LARGEST
    if contents is Contents.LARGE:
        return powers.pow(20.0)
    if contents is Contents.SPECIAL:
        powers[::7], powers[3::11] = torch.nan, torch.inf
    return powers


def query_scales(
    contents: Contents, record: IndexFormat, shape: tuple[int, ...], dim: int, generator: torch.Generator
) -> Tensor | None:
    """int32 words of the scales of q, None where the format has none."""
    if not record.is_block_scaled:
        return None
    return _scale_words(contents, record, shape, dim, -_KEY_EXPONENT, generator)


def _scale_words(
    contents: Contents, record: IndexFormat, shape: tuple[int, ...], dim: int, exponent: int, generator: torch.Generator
) -> Tensor:
    """int32 words of four ue8m0. Of LARGE contents those of keys are far up and those of q as far down."""
    spread, base = {Contents.NORMAL: (4, -6), Contents.LARGE: (10, exponent)}.get(contents, (1, 0))
    size = (*shape, SCALE_WORD_BYTES)
    codes = torch.randint(127 + base - spread, 128 + base + spread, size, device=generator.device, generator=generator)
    if contents is Contents.SPECIAL and exponent > 0:
        codes[::7, 0] = 0xFF
    codes[..., record.scale_count(dim) :] = 0xFF  # nobody reads them
    return codes.to(torch.uint8).view(torch.int32).squeeze(-1)


def weights_of(contents: Contents, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 weights of either sign."""
    device = generator.device
    if contents is Contents.NORMAL:
        return torch.randn(shape, device=device, generator=generator)
    weights = torch.randint(-3, 4, shape, device=device, generator=generator).float()
    if contents is Contents.LARGE:
        return weights * torch.randint(-20, 20, shape, device=device, generator=generator).float().exp2()
    if contents is Contents.SPECIAL:
        weights[::3, 1], weights[1::3, 2] = torch.nan, -torch.inf
    return weights


def whole_storage(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
