"""Inputs of a case, drawn on the device that runs it. Everything that no result may depend on is poison.

Only tokens that some row selects are written; all others, page padding and the gaps of strided tensors hold NaN or huge
values, and index columns at or past a length hold ids of such tokens or no ids at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dsagen.check.cache import allocate_cache, encode, natural_rule, power_of_two, quantise_rows, write_tokens
from dsagen.check.cases import DecodeCase, Ids, Lengths, Values
from dsagen.dtype import E4M3, NanRule
from dsagen.families.sparse_decode.reference import Source
from dsagen.kv_format import CACHE_ALIGNMENT_BYTES, KvFormat, ScaleKind

_INVALID_SHARE = 0.15
_WILD = (-1, -(2**31), -123456, 2147480000, 2**31 - 1)
# Columns of one step of a ramp, and its height in log2 units.
_RAMP_COLUMNS, _RAMP_LOG2 = 64, 32.0
_SPARE_PAGES = 2


@dataclass(frozen=True)
class DecodeInputs:
    """Arguments of one call: q bf16 [b, s_q, h, d_qk], caches by tensor name, indices int32 [b, s_q, topk], or
    [b, s_q, kv_heads, topk] where each KV head has its own; the same of the second cache where there is one.
    """

    record: KvFormat
    q: Tensor
    caches: Mapping[str, Tensor]
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    sm_scale: float
    extra: Source | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The caches with their lists."""
        main = Source(self.record, self.caches, self.indices, self.topk_length)
        return (main, self.extra) if self.extra else (main,)

    def part(self, requests: slice) -> DecodeInputs:
        """The inputs of some of the requests."""
        main, *extra = (
            replace(
                source,
                indices=source.indices[requests],
                topk_length=None if source.topk_length is None else source.topk_length[requests],
            )
            for source in self.sources
        )
        return replace(
            self,
            q=self.q[requests],
            indices=main.indices,
            topk_length=main.topk_length,
            extra=extra[0] if extra else None,
        )

    def overwrite(self, other: DecodeInputs) -> None:
        """Take over another set's contents in place; shapes must agree."""
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(self.q, other.q), (self.attn_sink, other.attn_sink)]
        for mine, theirs in zip(self.sources, other.sources, strict=True):
            assert isinstance(mine.caches, Mapping) and isinstance(theirs.caches, Mapping)
            pairs += [(mine.indices, theirs.indices), (mine.topk_length, theirs.topk_length)]
            pairs += [(cache, theirs.caches[name]) for name, cache in mine.caches.items()]
        for into, new in pairs:
            if into is not None and new is not None:
                into.copy_(new)


def make_inputs(
    case: DecodeCase,
    record: KvFormat,
    heads: int | tuple[int, int],
    device: torch.device,
    generator: torch.Generator,
    extra_record: KvFormat | None = None,
) -> DecodeInputs:
    """Draw the inputs of a case; `generator` belongs to `device`. `heads` are query heads, or these and KV heads.

    `extra_record` is for cases with a second cache.
    """
    draws = [_Draw(case, record, heads, device, generator)]
    if case.extra is not None:
        assert extra_record is not None, f"{case.name} has a second cache, the kernels have none"
        other = replace(case, **asdict(case.extra), extra=None)
        draws.append(_Draw(other, extra_record, heads, device, generator))
    sources, contents = zip(*(draw.source() for draw in draws), strict=True)
    main = draws[0]
    return DecodeInputs(
        record=record,
        q=main.placed(main.query(contents).bfloat16(), math.nan, 128),
        caches=sources[0].caches,
        indices=sources[0].indices,
        topk_length=sources[0].topk_length,
        attn_sink=main.sink() if case.sink else None,
        sm_scale=main.sm_scale,
        extra=sources[1] if case.extra is not None else None,
    )


@dataclass(frozen=True)
class _Contents:
    """Segments of the selected tokens, and the typical size of each dim where that is not about 0.1."""

    segments: dict[str, Tensor]
    typical: Tensor | None = None


class _Draw:
    def __init__(
        self,
        case: DecodeCase,
        record: KvFormat,
        heads: int | tuple[int, int],
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self.case, self.record, self.device, self.generator = case, record, device, generator
        self.heads, self.kv_heads = (heads, 1) if isinstance(heads, int) else heads
        # The lists of a query token, one or one for each KV head.
        self.lists = self.kv_heads if case.own_lists else 1
        self.sm_scale = record.d_qk**-0.55
        self.request_pages = -(-case.kv_tokens // case.page_size)
        self.pages = case.batch * self.request_pages + _SPARE_PAGES

    # Random draws, all from the one generator.
    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def queries(self) -> Tensor:
        """bf16 from the start, since the largest cases would not fit twice."""
        shape = (self.case.batch, self.case.s_q, self.heads, self.record.d_qk)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in low .. high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def source(self) -> tuple[Source, _Contents]:
        """A cache with lists that select from it."""
        case, record = self.case, self.record
        ids = self.ids()
        lengths = self.lengths()
        columns = torch.arange(case.topk, device=self.device)
        live = columns < (case.topk if lengths is None else lengths.clamp(0, case.topk).view(case.batch, -1, 1))
        live = live.expand(ids.shape)
        ids = self.without_invalid(ids, live)
        valid = live & (ids >= 0)
        tokens, rows = self.selected(ids, valid)
        caches = self.allocate()
        contents = self.contents(tokens, ids)
        write_tokens(record, caches, rows, contents.segments)
        indices = torch.where(valid, ids, self.invalid_ids(ids, live)).int()
        if self.lists > 1:
            lists = (case.batch, case.s_q, self.lists)
            indices = indices.view(*lists, case.topk)
            lengths = lengths.view(lists) if lengths is not None and lengths.ndim == 2 else lengths
        given = None if lengths is None else self.placed_lengths(lengths.int())
        return Source(record, self.by_head(caches), self.placed(indices, 0, 128), given), contents

    def selected(self, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, rows of the pool) that some list selects, int64; a token has a row for each KV head."""
        page_size, kv_heads = self.case.page_size, self.kv_heads
        chosen = torch.zeros(self.pages * page_size, kv_heads, dtype=torch.bool, device=self.device)
        for head in range(kv_heads):
            own = slice(head, None, self.lists) if self.lists > 1 else slice(None)
            chosen[ids[:, own][valid[:, own]], head] = True
        tokens, heads = chosen.nonzero().unbind(1)
        page, slot = tokens // page_size, tokens % page_size
        row = heads * page_size + slot if self.case.by_kv_head else slot * kv_heads + heads
        return tokens, page * page_size * kv_heads + row

    def allocate(self) -> dict[str, Tensor]:
        """The cache's tensors, a token for each row."""
        rows = self.case.page_size * self.kv_heads
        return allocate_cache(self.record, self.pages, rows, self.device, self.padding_bytes())

    def by_head(self, caches: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same as [pages, page_size, kv_heads, columns]."""
        if self.kv_heads == 1:
            return caches
        shape = (self.kv_heads, self.case.page_size) if self.case.by_kv_head else (self.case.page_size, self.kv_heads)
        split = {name: cache.view(self.pages, *shape, -1) for name, cache in caches.items()}
        return {name: cache.transpose(1, 2) for name, cache in split.items()} if self.case.by_kv_head else split

    def padding_bytes(self) -> int:
        """Bytes behind each page: room for a token, in whole units of what bases and strides are multiples of."""
        if not self.case.padded_pages:
            return 0
        return -(-self.record.record_bytes // CACHE_ALIGNMENT_BYTES) * CACHE_ALIGNMENT_BYTES

    def query(self, contents: Sequence[_Contents]) -> Tensor:
        """The queries in bf16 or fp32, such that logits are of the size that the case asks for in each cache."""
        values, d_qk = self.case.values, self.record.d_qk
        typical = [found.typical for found in contents if found.typical is not None]
        if typical:
            largest = torch.stack(typical).amax(0)[:d_qk].clamp_min(1e-30)
            deviation = 2.0 / (self.sm_scale * math.sqrt(d_qk))
            return torch.div(self.queries() * deviation, largest)
        q = self.queries().clamp_(-1, 1)
        if values in (Values.RAMP_UP, Values.RAMP_DOWN):
            q[..., d_qk - 1] = _RAMP_LOG2 * math.log(2) / self.sm_scale
        elif values in (Values.PEAKED, Values.NAN_SELECTED, Values.HUGE):
            deviation = 3000.0 if values is Values.HUGE else 4.0
            q *= deviation / (self.sm_scale * 0.085 * math.sqrt(d_qk))
        return q

    # ---- which tokens -----------------------------------------------------------------------------------------------

    def ids(self) -> Tensor:
        """int64 [b, s_q x lists, topk]: physical ids, distinct in a row, -1 where the request has no more tokens."""
        case = self.case
        queries = case.s_q * self.lists
        rows = 1 if case.ids is Ids.SHARED else case.batch * queries
        request = torch.arange(rows, device=self.device) // queries
        tokens = torch.full((case.batch,), case.kv_tokens, device=self.device)
        if case.varying:
            tokens = self.integers(1, case.kv_tokens + 1, case.batch)
        if case.empty_requests:
            tokens = tokens.masked_fill(self.uniform(case.batch) < 0.5, 0)
            tokens[0] = 0
        width = min(case.topk, case.kv_tokens)
        key = self.uniform(rows, case.kv_tokens)
        key.masked_fill_(torch.arange(case.kv_tokens, device=self.device) >= tokens[request].unsqueeze(1), 2.0)
        smallest = key.topk(width, 1, largest=False)
        position = smallest.indices.masked_fill(smallest.values > 1.5, -1)
        if case.ids is Ids.DUPLICATES:
            position = position[:, :5].gather(1, self.integers(0, 5, rows, width))
        position = torch.nn.functional.pad(position, (0, case.topk - width), value=-1)
        position = position.gather(1, self.uniform(rows, case.topk).argsort(1))
        page_table = torch.randperm(self.pages, device=self.device, generator=self.generator)
        physical_page = page_table[request.unsqueeze(1) * self.request_pages + position.clamp(min=0) // case.page_size]
        ids = physical_page * case.page_size + position.clamp(min=0) % case.page_size
        ids = ids.masked_fill(position < 0, -1)
        return ids.expand(case.batch * queries, -1).view(case.batch, queries, case.topk)

    def lengths(self) -> Tensor | None:
        """int64 [b] or [b, s_q x lists]; 0, full and (in wild cases) out-of-range ones among them where it has room."""
        case = self.case
        if case.lengths is Lengths.NONE:
            return None
        shape = (case.batch,) if case.lengths is Lengths.PER_REQUEST else (case.batch, case.s_q * self.lists)
        lengths = self.integers(0, case.topk + 1, *shape).flatten()
        special = [case.topk, 0, *((case.topk + 7, -3) if case.wild_ids else ())]
        places = torch.randperm(lengths.numel(), device=self.device, generator=self.generator)
        for place, value in zip(places[: max(0, lengths.numel() - 1)], special, strict=False):
            lengths[place] = value
        return lengths.view(shape)

    def without_invalid(self, ids: Tensor, live: Tensor) -> Tensor:
        """Ids with some live columns made invalid (-1) as the case asks."""
        case, columns = self.case, torch.arange(self.case.topk, device=self.device)
        if case.ids is Ids.ALL_INVALID:
            return torch.full_like(ids, -1)
        if case.ids is Ids.LAST_VALID:
            return ids.masked_fill(columns != live.sum(2, keepdim=True) - 1, -1)
        if case.ids is Ids.ONE_VALID:
            pick = (self.uniform(*ids.shape[:2], 1) * live.sum(2, keepdim=True)).long()
            return ids.masked_fill(columns != pick, -1)
        drop = self.uniform(1, 1, case.topk) if case.ids is Ids.SHARED else self.uniform(*ids.shape)
        # A row of a few columns keeps one at least, so that narrow cases are not empty ones.
        kept = (drop >= _INVALID_SHARE) | ((columns == 0) & (case.topk < 8))
        return ids.masked_fill(~kept, -1)

    def invalid_ids(self, ids: Tensor, live: Tensor) -> Tensor:
        """What invalid columns hold: -1 or wilder, and past the length also ids of real but unselected tokens."""
        pool_tokens = self.pages * self.case.page_size
        wild = torch.tensor((*_WILD, pool_tokens, pool_tokens + 12345), device=self.device)
        wild = wild.masked_fill((wild >= 0) & (wild < pool_tokens), -1)
        garbage = wild[self.integers(0, wild.numel(), *ids.shape)]
        inside = garbage if self.case.wild_ids else torch.full_like(ids, -1)
        behind = torch.where(self.uniform(*ids.shape) < 0.5, garbage, ids)
        return torch.where(live, inside, behind)

    def sink(self) -> Tensor:
        """fp32 [heads]: some +inf and -inf where there are heads enough."""
        sink = self.normal(self.heads) * 2
        if self.heads >= 4:
            places = torch.randperm(self.heads, device=self.device, generator=self.generator)
            sink[places[0]], sink[places[1]] = math.inf, -math.inf
        return sink

    # ---- what they hold ---------------------------------------------------------------------------------------------

    def contents(self, tokens: Tensor, ids: Tensor) -> _Contents:
        """What the tokens hold for the case's kind of values."""
        values = self.case.values
        if values in (Values.MIXED_SCALES, Values.WILD_SCALES, Values.SUBNORMAL):
            return self.coded_contents(tokens.numel())
        x = (self.normal(tokens.numel(), self.record.row_dims) / 10).clamp(-1, 1)
        if values in (Values.RAMP_UP, Values.RAMP_DOWN):
            self.ramp(x, tokens, ids)
        segments = quantise_rows(self.record, x.bfloat16(), natural_rule(self.record))
        if values is Values.NAN_SELECTED:
            self.plant_nan(segments, tokens)
        return _Contents(segments)

    def ramp(self, x: Tensor, tokens: Tensor, ids: Tensor) -> None:
        """Make the logit follow the column: one dim holds the step, as nearly as the format can."""
        row = ids[0, 0]
        steps = torch.arange(row.numel(), device=self.device) // _RAMP_COLUMNS
        if self.case.values is Values.RAMP_DOWN:
            steps = steps.max() - steps
        step_of = torch.zeros(self.pages * self.case.page_size, device=self.device)
        step_of[row[row >= 0]] = steps[row >= 0].float()
        x[:, self.record.d_qk - 1] = step_of[tokens]

    def coded_contents(self, count: int) -> _Contents:
        """Tokens given by codes and scales rather than by rows."""
        record, subnormal = self.record, self.case.values is Values.SUBNORMAL
        row_dims, groups = record.row_dims, record.scale_groups or (record.first_value + record.d_v) // 128
        group_dims = record.scale_group_dims or 128
        magnitude = self.magnitudes(count, groups)
        values = self.codes(count, groups * group_dims, subnormal)
        code_rms = float(values.float().square().mean().sqrt())
        plain = self.normal(count, row_dims - groups * group_dims) * 0.3
        segments: dict[str, Tensor] = {}
        if record.scale_groups:
            segments["scales"] = encode(record.segment("scales").element, magnitude)
        else:
            values = values * magnitude.repeat_interleave(group_dims, 1)
        dims = torch.cat((values, plain), 1)
        for segment in record.data_segments:
            part = dims[:, segment.first_dim : segment.first_dim + segment.count]
            segments[segment.name] = encode(segment.element, part)
        typical = magnitude.square().mean(0).sqrt().repeat_interleave(group_dims) * code_rms
        return _Contents(segments, torch.cat((typical, torch.full((plain.shape[1],), 0.3, device=self.device))))

    def codes(self, count: int, dims: int, subnormal: bool) -> Tensor:
        """fp32 values of the format's codes (of e4m3 where values are plain): any of them, or only subnormals."""
        values = self.record.segment("values").element
        element = values if values.bits <= 8 else E4M3
        numbers = [element.decode(code) for code in range(1 << element.bits)]
        smallest_normal = 2.0 ** (1 - element.bias)
        usable = [x for x in numbers if math.isfinite(x) and (not subnormal or 0 < abs(x) < smallest_normal)]
        table = torch.tensor(usable, device=self.device)
        return table[self.integers(0, len(usable), count, dims)]

    def magnitudes(self, count: int, groups: int) -> Tensor:
        """fp32 scales [count, groups]; powers of two where the format has no others."""
        kinds = torch.arange(groups, device=self.device).expand(count, groups) % 3
        if self.case.values is Values.WILD_SCALES:
            kinds = self.integers(0, 3, count, groups)
        exponents = self.uniform(count, groups) * 6 - 4
        only_powers = self.record.scale_kind in (ScaleKind.FP32_POW2, ScaleKind.UE8M0)
        arbitrary = power_of_two(exponents.floor()) if only_powers else exponents.exp2()
        if self.record.scale_kind is ScaleKind.E4M3:
            return self.small_float_magnitudes(kinds, arbitrary)
        if self.case.values is Values.SUBNORMAL:
            return arbitrary
        fixed = torch.tensor((2.0**-13, 2.0**7), device=self.device)
        return torch.where(kinds == 2, arbitrary, fixed[kinds.clamp(max=1)])

    def plant_nan(self, segments: dict[str, Tensor], tokens: Tensor) -> None:
        """NaN into one element of a few selected tokens, each in another segment."""
        names = [segment.name for segment in self.record.segments]
        count = min(len(names), tokens.numel())
        for place, name in zip(self.integers(0, max(1, tokens.numel()), count).tolist(), names, strict=False):
            element = self.record.segment(name).element
            # All ones is NaN in every element type but FP4, and 0x7F too in e4m3.
            width = max(1, element.bits // 8)
            if element.nan_rule is not NanRule.NONE:
                segments[name][place, :width] = 0x7F if element is E4M3 else 0xFF

    def small_float_magnitudes(self, kinds: Tensor, arbitrary: Tensor) -> Tensor:
        """Scales that e4m3 holds exactly: subnormal ones, large ones of 128 to 448, arbitrary ones.

        None of a kind is much larger than the others, or one token would bear a group's whole value, and its rounded
        probability the whole error: up to 2^-8, which the gate of a group does not allow for.
        """
        element = self.record.segment("scales").element
        table = torch.tensor([element.decode(code) for code in range(0x7F)], device=self.device)
        subnormal, large = self.integers(1, 8, *kinds.shape), self.integers(0x70, 0x7F, *kinds.shape)
        rounded = (arbitrary.unsqueeze(2) - table).abs().argmin(2)
        return table[torch.where(kinds == 0, subnormal, torch.where(kinds == 1, large, rounded))]

    # ---- where they lie ---------------------------------------------------------------------------------------------

    def placed(self, tensor: Tensor, gap: float, over: int) -> Tensor:
        """The tensor as it is, or as part of one with `over` more columns and one more of every other dim."""
        if not self.case.strided:
            return tensor
        *outer, last = tensor.shape
        whole = torch.full((*(n + 1 for n in outer), last + over), gap, dtype=tensor.dtype, device=self.device)
        part = whole[tuple(slice(0, n) for n in tensor.shape)]
        part.copy_(tensor)
        return part

    def placed_lengths(self, lengths: Tensor) -> Tensor:
        """Per-token lengths as a part of a wider tensor in strided cases; per-request ones are always contiguous."""
        return self.placed(lengths, -1, 3) if lengths.ndim > 1 else lengths
