"""Completing a spec: what the model preset and the KV format fix is filled in before validation.

Values of a wrong type pass through untouched, for validation to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsagen.errors import SpecError
from dsagen.index_format import INDEX_FORMATS
from dsagen.index_rule import INDEX_RULES, default_index_rule
from dsagen.kv_format import (
    KV_FAMILIES,
    KV_FORMATS,
    PLAIN_ELEMENTS,
    KvFormat,
    kv_format,
    plain_format,
    resolve_kv_format,
)
from dsagen.kv_rule import COPY, default_rule
from dsagen.model import MODELS, ModelPreset, model_preset
from dsagen.spec_problems import MAX_HEADS, NOTHING, problem

NO_EXTRA_CACHE = "none"
# The ops that read `scores`, and what it is unless told otherwise.
SCORES_OPS = ("topk", "indexer_logits")
DEFAULT_SCORES = "fp32"
# The op that reads `kv_write`, the one that reads `index_write`, and the rows that both write unless told otherwise.
CACHE_OP = "kv_cache"
INDEX_CACHE_OP = "index_cache"
DEFAULT_ROWS = "bf16"
# The ops that read `index`.
INDEX_OPS = ("indexer_logits", INDEX_CACHE_OP)
# The op that alone reads some keys of the index, and these.
INDEXER_OP = "indexer_logits"
INDEXER_KEYS = ("forms", "accumulation", "histogram")
# The ops of a decode step, which together read `index.histogram`, in the order of their launches.
STEP_OPS = ("indexer_logits", "topk", "sparse_decode")
# The op that reads `kv_heads`.
DECODE_OP = "sparse_decode"
# Keys that are there exactly where one of some ops is; `kv_heads` only where there are several.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "scores": SCORES_OPS,
    "kv_write": (CACHE_OP,),
    "index_write": (INDEX_CACHE_OP,),
    "index": INDEX_OPS,
    "kv_heads": (DECODE_OP,),
}


def known_ops() -> tuple[str, ...]:
    """The ops that a spec may ask for: one per family, found by its folder so that a new family touches no list."""
    folder = Path(__file__).resolve().parent / "families"
    return tuple(sorted(package.parent.name for package in folder.glob("*/__init__.py")))


def complete(data: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with every key that follows from others; raises ProblemError where nothing can follow."""
    full = dict(data)
    preset = _preset(full)
    heads = full.get("heads")
    # A wrong head count is reported once, not a second time as part of a name.
    full.setdefault("name", f"{preset.name}_h{heads}" if type(heads) is int and 0 < heads <= MAX_HEADS else preset.name)
    given_dims = full.get("dims", {})
    if isinstance(given_dims, Mapping):
        _check_dims(given_dims, preset)
    d_qk, d_v = preset.d_qk, preset.d_v
    if isinstance(given_dims, Mapping):
        d_qk, d_v = given_dims.get("d_qk", d_qk), given_dims.get("d_v", d_v)
    full["kv"], record = _complete_kv("kv", full.get("kv", preset.kv), preset.kv, d_qk, d_v)
    if isinstance(given_dims, Mapping) and record is not None:
        full["dims"] = {"d_qk": record.d_qk, "d_v": record.d_v, **given_dims}
    full["extra_kv"] = _complete_extra(full, preset, record)
    if "topk" not in full:
        if preset.topk is None:
            raise problem(("topk",), f"is missing: model {preset.name} has no default capacity, for example 2048")
        full["topk"] = preset.topk
    ops = full.get("ops")
    _refuse_unread(full, ops)
    if isinstance(ops, list | tuple) and any(op in ops for op in SCORES_OPS):
        full.setdefault("scores", DEFAULT_SCORES)
    # A part that is declared is completed whatever the ops: where they are wrong, only that is to be said.
    if (isinstance(ops, list | tuple) and CACHE_OP in ops) or isinstance(full.get("kv_write"), Mapping):
        full["kv_write"] = _complete_write(full.get("kv_write", {}), full["kv"], full["extra_kv"])
    reads_index = isinstance(ops, list | tuple) and any(op in ops for op in INDEX_OPS)
    if reads_index or isinstance(full.get("index"), Mapping):
        full["index"] = _complete_index(full.get("index", {}), preset)
    if (isinstance(ops, list | tuple) and INDEX_CACHE_OP in ops) or isinstance(full.get("index_write"), Mapping):
        full["index_write"] = _complete_index_write(full.get("index_write", {}), full.get("index"))
    return full


def _refuse_unread(full: Mapping[str, Any], ops: Any) -> None:
    """Refuse a key that no op reads before its values are judged; without good ops there is nothing to say."""
    known = known_ops()
    if not isinstance(ops, list | tuple) or not ops or any(op not in known for op in ops):
        return
    for key, readers in READ_BY.items():
        if not set(readers) & set(ops) and full.get(key) is not None:
            shown = NOTHING if isinstance(full[key], Mapping) else full[key]
            raise problem((key,), f"nothing reads it: add {' or '.join(readers)} to ops, or leave it out", shown)
    index = full.get("index")
    if INDEXER_OP not in ops and isinstance(index, Mapping):
        for key in INDEXER_KEYS:
            if key in index:
                text = f"nothing reads it: add {INDEXER_OP} to ops, or leave it out"
                raise problem(("index", key), text, index[key])


def _complete_write(value: Any, kv: Any, extra_kv: Any) -> Any:
    """How rows are written, with a rule for each cache that is there."""
    if not isinstance(value, Mapping):
        return value
    # Beside what is no cache any rule will do: that is what the error says.
    rules = {"rule": COPY}
    for key, cache in (("rule", kv), ("extra_rule", extra_kv)):
        record = _known_record(cache)
        if record is not None:
            rules[key] = default_rule(record)
    return {"rows": DEFAULT_ROWS, **rules, **value}


def _complete_index_write(value: Any, index: Any) -> Any:
    """How index keys are written, by a rule of their format."""
    if not isinstance(value, Mapping):
        return value
    keys = index.get("keys") if isinstance(index, Mapping) else None
    # What is no format is told later; until then any rule will do.
    record = INDEX_FORMATS.get(keys) if isinstance(keys, str) else None
    rule = INDEX_RULES[0] if record is None else default_index_rule(record)
    return {"rows": DEFAULT_ROWS, "rule": rule, **value}


def _known_record(cache: Any) -> KvFormat | None:
    """The record of a completed cache, None where its format is no id of one."""
    try:
        return kv_format(cache["format"]) if isinstance(cache, Mapping) else None
    except (KeyError, SpecError):
        return None


def _complete_index(value: Any, preset: ModelPreset) -> Any:
    """The indexer: declared, or the preset's, whose key format may be left to the spec."""
    if not isinstance(value, Mapping):
        return value
    known = preset.index
    full = {**({} if known is None else {"heads": known.heads, "dim": known.dim, "keys": known.keys}), **value}
    for key, example in (("heads", "64"), ("dim", "128"), ("keys", " or ".join(INDEX_FORMATS))):
        if full.get(key) is None:
            raise problem(("index", key), f"is missing: model {preset.name} has none, for example {example}")
    return full


def _preset(data: Mapping[str, Any]) -> ModelPreset:
    if "model" not in data:
        raise problem(("model",), f"is missing: choose one of {', '.join(MODELS)}")
    try:
        return model_preset(data["model"])
    except SpecError as error:
        raise problem(("model",), str(error), data["model"]) from None


def _check_dims(dims: Mapping[str, Any], preset: ModelPreset) -> None:
    for key, fixed in (("d_qk", preset.d_qk), ("d_v", preset.d_v)):
        if fixed is not None and dims.get(key, fixed) != fixed:
            raise problem(("dims", key), f"model {preset.name} has {key} {fixed}; others need model: custom", dims[key])


def _complete_kv(key: str, value: Any, default_family: str | None, d_qk: Any, d_v: Any) -> tuple[Any, KvFormat | None]:
    """A cache declaration with format, layout and scale, and its record; text is short for its format."""
    if value is None:
        raise problem((key,), f"is missing: name a KV format, one of {', '.join(KV_FAMILIES)}")
    cache = {"format": value} if isinstance(value, str) else value
    if not isinstance(cache, Mapping):
        return value, None
    family = cache.get("format", default_family)
    if family is None:
        raise problem((key, "format"), f"is missing: choose one of {', '.join(KV_FAMILIES)}")
    record = _resolve(key, family, cache.get("layout"), cache.get("scale"), d_qk, d_v)
    named = {"format": record.format_id, "layout": record.layout.value, "scale": record.scale_kind.value}
    return {**cache, **named}, record


def _resolve(key: str, family: Any, layout: Any, scale: Any, d_qk: Any, d_v: Any) -> KvFormat:
    try:
        record = resolve_kv_format(family, layout, scale)
    except SpecError as error:
        names = {"layout": layout, "scale": scale}
        part = next((name for name in names if f"has no {name} " in str(error)), "format")
        raise problem((key, part), str(error), names.get(part, family)) from None
    if family == record.family and family in PLAIN_ELEMENTS and type(d_qk) is int and type(d_v) is int:
        try:
            return plain_format(family, d_qk, d_v)
        except SpecError as error:
            raise problem(("dims",), str(error)) from None
    if d_qk is None or not isinstance(d_qk, int) or record.d_qk == d_qk:
        return record
    try:
        return resolve_kv_format(family, layout, scale, d_qk)
    except SpecError:
        fitting = tuple(r.format_id for r in KV_FORMATS.values() if r.d_qk == d_qk)
        text = f"holds rows of {record.d_qk} dims where d_qk is {d_qk}"
        if not fitting:
            raise problem((key, "format"), f"{text}, for which no format exists", family) from None
        raise problem((key, "format"), text, family, choices=fitting) from None


def _complete_extra(full: Mapping[str, Any], preset: ModelPreset, main: KvFormat | None) -> Any:
    """The second cache: declared, or the preset's in the main cache's layout, or none."""
    value = full.get("extra_kv", preset.extra_kv or NO_EXTRA_CACHE)
    if value is None:
        raise problem(("extra_kv",), f"is empty: write {NO_EXTRA_CACHE}, a format or a mapping")
    if value == NO_EXTRA_CACHE or main is None:
        return None
    cache = {"format": value} if isinstance(value, str) else value
    if not isinstance(cache, Mapping):
        return value
    layouts = {r.layout.value for r in KV_FORMATS.values() if r.family == cache.get("format", preset.extra_kv)}
    if "layout" not in cache and main.layout.value in layouts:
        cache = {**cache, "layout": main.layout.value}
    cache, _ = _complete_kv("extra_kv", cache, preset.extra_kv, main.d_qk, main.d_v)
    if "topk" not in cache and preset.extra_topk is None:
        raise problem(("extra_kv", "topk"), "is missing: the second cache has its own capacity, for example 512")
    return {"topk": preset.extra_topk, **cache}
