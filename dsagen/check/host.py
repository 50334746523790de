"""What can be proven of a spec without a device: everything renders, and the reference means what it should."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dsagen.check.cache import allocate_cache, natural_rule, quantise_rows, write_tokens
from dsagen.check.report import CaseResult
from dsagen.check.scalar_rule import scalar_group
from dsagen.dtype import ElementType
from dsagen.errors import DsagenError
from dsagen.families.index_cache.reference import quantise_keys
from dsagen.families.kv_cache import reference as kv_cache
from dsagen.families.sparse_decode.reference import combine_reference, read_tokens, sparse_decode_reference
from dsagen.families.topk.reference import topk_reference
from dsagen.index_format import index_format
from dsagen.index_rule import index_rule
from dsagen.kv_format import KvFormat
from dsagen.kv_rule import write_rule
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.spec import DeploymentSpec

_PAGE_SIZE, _PAGES = 5, 4


def host_proofs(spec: DeploymentSpec, seed: int) -> tuple[CaseResult, ...]:
    """Run every proof of the spec's ops; a result's `problem` says what does not hold."""
    proofs: list[tuple[str, Callable[[DeploymentSpec, int], str]]] = [("host.every cell renders", _renders)]
    if {"sparse_decode", "kv_cache"} & set(spec.ops):
        proofs.append(("host.bytes follow the format record", _bytes_agree))
    if "sparse_decode" in spec.ops:
        proofs.append(("host.splits merge to the whole", _splits_merge))
    if "kv_cache" in spec.ops:
        proofs.append(("host.rules are their arithmetic", _rules_hold))
    if "index_cache" in spec.ops:
        proofs.append(("host.index-key rule is its arithmetic", _index_rule_holds))
    if "topk" in spec.ops:
        proofs.append(("host.selections are those of sorted lists", _selections_sort))
    return tuple(_run(name, proof, spec, seed) for name, proof in proofs)


def _run(name: str, proof: Callable[[DeploymentSpec, int], str], spec: DeploymentSpec, seed: int) -> CaseResult:
    start = time.perf_counter()
    try:
        problem = proof(spec, seed)
    except DsagenError as error:
        problem = str(error)
    return CaseResult(name, "failed" if problem else "passed", time.perf_counter() - start, problem=problem)


def _renders(spec: DeploymentSpec, _: int) -> str:
    matrix = expand(spec)
    matrix.require_complete()
    for plan in matrix.plans():
        unit = render(plan)
        if unit.symbol not in unit.text:
            return f"{unit.slug}: the text does not define {unit.symbol}"
    return ""


def _bytes_agree(spec: DeploymentSpec, seed: int) -> str:
    """Tokens read through torch against each record's scalar byte map, dim by dim."""
    records = dict.fromkeys((spec.kv_format, spec.extra_kv_format or spec.kv_format))
    return next(filter(None, (_record_disagrees(record, seed) for record in records)), "")


def _record_disagrees(record: KvFormat, seed: int) -> str:
    caches, tokens = _small_cache(record, seed)
    rows = read_tokens(record, caches, torch.arange(tokens))
    images = {name: _storage(cache) for name, cache in caches.items()}
    strides = {name: cache.view(torch.uint8).stride(0) for name, cache in caches.items()}
    for token in range(tokens):
        for dim in range(0, record.row_dims, 7):
            value = _scalar(record, images, strides, token, dim)
            if value != rows[token, dim].item():
                where = f"{record.format_id}: token {token}, dim {dim}"
                return f"{where}: {rows[token, dim].item()} read, {value} by the byte map"
    return ""


def _splits_merge(spec: DeploymentSpec, seed: int) -> str:
    record, generator = spec.kv_format, torch.Generator().manual_seed(seed)
    caches, tokens = _small_cache(record, seed)
    q = torch.randn(2, 1, spec.heads, record.d_qk, generator=generator).bfloat16()
    indices = torch.randint(-3, tokens, (2, 1, 24), generator=generator, dtype=torch.int32)
    indices[0, 0, 8:16] = -1
    sink = torch.randn(spec.heads, generator=generator)
    whole = sparse_decode_reference(q, record, caches, indices, sm_scale=0.1, attn_sink=sink)
    parts = [
        sparse_decode_reference(q, record, caches, part, sm_scale=0.1, lse_base=2, empty_lse=-float("inf"))
        for part in torch.split(indices, 8, 2)
    ]
    out, lse = combine_reference(
        torch.stack([p.lse for p in parts], 1), torch.stack([p.out for p in parts], 1), attn_sink=sink
    )
    error = max(float((out - whole.out).abs().max()), float((lse - whole.lse).abs().max()))
    return "" if error < 1e-10 else f"merged splits differ from the whole by {error:.3g}"


def _rules_hold(spec: DeploymentSpec, seed: int) -> str:
    """Each cache's rule in torch against Python's arithmetic, rounded to fp32 after each step, and a search."""
    assert spec.kv_write is not None
    caches = [(spec.kv_format, spec.kv_write.rule), (spec.extra_kv_format, str(spec.kv_write.extra_rule))]
    generator = torch.Generator().manual_seed(seed)
    for record, rule_id in caches:
        rule = None if record is None else write_rule(record, rule_id)
        if record is None or rule is None:
            continue
        exponents = torch.randint(-20, 8, (24, 1), generator=generator).float()
        x = torch.randn(24, record.row_dims, generator=generator).bfloat16() * exponents.exp2()
        written = kv_cache.quantise_rows(record, x, rule_id)
        for row in range(0, 24, 3):
            group = row % record.scale_groups
            dims = slice(group * record.scale_group_dims, (group + 1) * record.scale_group_dims)
            want = scalar_group(rule, x[row, dims].tolist())
            if want != _stored_group(record, written, row, group):
                return f"{record.format_id}, {rule_id}: row {row}, group {group} is not what the rule says"
    return ""


def _index_rule_holds(spec: DeploymentSpec, seed: int) -> str:
    """The rule of index keys in torch against Python's arithmetic, rounded to fp32 after each step, and a search."""
    assert spec.index is not None and spec.index_write is not None
    record, dim, rule_id = index_format(spec.index.keys), spec.index.dim, spec.index_write.rule
    generator, count = torch.Generator().manual_seed(seed), record.scale_count(dim)
    exponents = torch.randint(-20, 8, (24, 1), generator=generator).float()
    x = torch.randn(24, dim, generator=generator).bfloat16() * exponents.exp2()
    codes, words = quantise_keys(record, x, rule_id)
    for row in range(24):
        group, dims = row % count, dim // count
        want = scalar_group(index_rule(record, rule_id), x[row, group * dims : (group + 1) * dims].tolist())
        size = record.scale.bytes_per_element
        stored = bytes(words[row, group * size : (group + 1) * size].tolist())
        found = record.scale.decode(int.from_bytes(stored, "little")), _codes_of(record.values, codes[row].tolist())
        if (found[0], found[1][group * dims : (group + 1) * dims]) != want:
            return f"{record.format_id}, {rule_id}: key {row}, scale {group} is not what the rule says"
    return ""


def _codes_of(element: ElementType, data: list[int]) -> list[int]:
    """Codes in bytes, of two in a byte the low one first."""
    return data if element.bits == 8 else [code for byte in data for code in (byte & 15, byte >> 4)]


def _stored_group(record: KvFormat, written: dict[str, torch.Tensor], row: int, group: int) -> tuple[float, list[int]]:
    """Scale and codes of a group as bytes hold them."""
    scales, values = record.segment("scales").element, record.segment("values").element
    size = scales.bits // 8
    data = bytes(written["scales"][row, group * size : (group + 1) * size].tolist())
    codes = _codes_of(values, written["values"][row].tolist())
    first = group * record.scale_group_dims
    return scales.decode(int.from_bytes(data, "little")), codes[first : first + record.scale_group_dims]


def _selections_sort(_: DeploymentSpec, seed: int) -> str:
    """Top-k's reference against Python's sort of (class, -value, index)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])
    scores = values[torch.randint(0, len(values), (40, 19), generator=generator)]
    lengths = torch.randint(-2, 22, (40,), generator=generator)
    starts = torch.randint(0, 12, (40,), generator=generator)
    for drops in (False, True):
        found, counts = topk_reference(scores, 7, lengths=lengths, starts=starts, drop_neg_inf=drops)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            window = scores[row].tolist()[start : start + max(length, 0)]
            ranked = sorted((value != value, -value if value == value else 0.0, i) for i, value in enumerate(window))
            kept = [i for nan, negated, i in ranked if not (drops and (nan or negated == float("inf")))]
            want = sorted(kept[:7])
            if found[row].tolist() != want + [-1] * (7 - len(want)) or int(counts[row]) != len(want):
                return f"row {row}: {found[row].tolist()} selected, {want} by sorting"
    return ""


def _small_cache(record: KvFormat, seed: int) -> tuple[dict[str, torch.Tensor], int]:
    tokens = _PAGES * _PAGE_SIZE
    x = torch.randn(tokens, record.row_dims, generator=torch.Generator().manual_seed(seed)).bfloat16()
    caches = allocate_cache(record, _PAGES, _PAGE_SIZE, "cpu", extra_bytes=16)
    write_tokens(record, caches, torch.arange(tokens), quantise_rows(record, x, natural_rule(record)))
    return caches, tokens


def _storage(cache: torch.Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).tolist())


def _scalar(record: KvFormat, images: dict[str, bytes], strides: dict[str, int], token: int, dim: int) -> float:
    """Code times scale in Python, with the record's own arithmetic."""
    page, slot = divmod(token, _PAGE_SIZE)
    segment = next(s for s in record.data_segments if s.first_dim <= dim < s.first_dim + s.count)
    at = record.dim_address(page, slot, dim, _PAGE_SIZE, strides[segment.tensor])
    size = max(1, at.element.bits // 8)
    word = int.from_bytes(images[at.tensor][at.byte : at.byte + size], "little")
    value = at.element.decode(word >> at.shift_bits & ((1 << at.element.bits) - 1))
    group = record.scale_group(dim)
    if group is None:
        return value
    scales = record.segment("scales")
    byte = record.scale_byte(page, slot, group, _PAGE_SIZE, strides[scales.tensor])
    size = scales.element.bits // 8
    return value * scales.element.decode(int.from_bytes(images[scales.tensor][byte : byte + size], "little"))
