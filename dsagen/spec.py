"""DeploymentSpec: what a user declares about a deployment, validated as a whole.

    model: v32
    heads: 16
    archs: [sm_90a]
    ops: [sparse_decode]

The model preset fills what is left out; a loaded spec is complete, so printing it shows every decision. What is decided
at run time (batch, s_q, page size, strides, lengths) has no place here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dsagen.arch import ARCHS, Arch, arch
from dsagen.errors import SpecError
from dsagen.index_format import INDEX_FORMATS, index_format
from dsagen.index_rule import INDEX_RULES, index_rule
from dsagen.kv_format import KV_FAMILIES, KV_FORMATS, KvFormat, extra_cache_problem, kv_format
from dsagen.kv_rule import COPY, WRITE_RULES, write_rule
from dsagen.model import MODELS, ModelPreset, model_preset
from dsagen.spec_defaults import (
    CACHE_OP,
    INDEX_CACHE_OP,
    INDEX_OPS,
    INDEXER_KEYS,
    INDEXER_OP,
    NO_EXTRA_CACHE,
    READ_BY,
    STEP_OPS,
    complete,
    known_ops,
)
from dsagen.spec_problems import (
    MAX_HEADS,
    MAX_ROW_ELEMENTS,
    MAX_TOPK,
    Problem,
    ProblemError,
    describe_validation_error,
    problem,
    show,
)
from dsagen.spec_source import (
    SpecSource,
    parse_spec_text,
    read_spec_source,
    resolve_spec_path,
    shipped_spec_folder,
    shipped_specs,
)
from dsagen.spec_values import plain_values

__all__ = [
    "DeploymentSpec",
    "DimsSpec",
    "ExtraKvSpec",
    "IndexSpec",
    "IndexWriteSpec",
    "InvalidSpecError",
    "KvSpec",
    "KvWriteSpec",
    "LseSpec",
    "json_schema",
    "known_ops",
    "load_spec",
    "parse_spec",
    "resolve_spec_path",
    "shipped_spec_folder",
    "shipped_specs",
]

# Names reach file names, logs and tables; this pattern has no room for code, templates or paths.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"

# A format may be written as its family, or as a record id that says the layout or scale too.
_FORMAT_NAMES: Any = list(dict.fromkeys((*KV_FAMILIES, *KV_FORMATS)))

_INDEX_FORMAT_NAMES: Any = list(INDEX_FORMATS)
_RULE_NAMES: Any = [COPY, *WRITE_RULES]
_INDEX_RULE_NAMES: Any = list(INDEX_RULES)

# Of a token, where a spec scores blocks.
MAX_CANDIDATE_BLOCKS = 4096
IndexForm = Literal["paged", "blocks", "ragged", "candidates"]
Capacity = Annotated[int, Field(ge=1, le=MAX_TOPK)]


class InvalidSpecError(SpecError):
    """A spec with problems, each with the key path it concerns."""

    def __init__(self, problems: list[Problem], source: SpecSource | None = None) -> None:
        self.problems, self._source = problems, source
        super().__init__("\n".join(p.message(source) for p in problems))

    def __reduce__(self) -> tuple[type[InvalidSpecError], tuple[list[Problem], SpecSource | None]]:
        # Without it a worker process could not hand the error back.
        return type(self), (self.problems, self._source)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KvSpec(_Part):
    """A KV cache. In a loaded spec `format` is the record's id; layout and scale repeat what the id implies."""

    format: str = Field(json_schema_extra={"enum": _FORMAT_NAMES})
    layout: Literal["interleaved", "page_split"]
    scale: Literal["none", "fp32", "fp32_pow2", "ue8m0", "e4m3"]

    @property
    def format_id(self) -> str:
        """Id of the format's record, as in slugs."""
        return self.format

    @property
    def record(self) -> KvFormat:
        """The format's record."""
        return kv_format(self.format)


class ExtraKvSpec(KvSpec):
    """A second KV cache in the same softmax, with its own capacity in index columns."""

    topk: Capacity


class DimsSpec(_Part):
    """Width of a scored row and of a summed row, in elements."""

    d_qk: int = Field(ge=1, le=MAX_ROW_ELEMENTS)
    d_v: int = Field(ge=1, le=MAX_ROW_ELEMENTS)


def _no_fraction(value: Any, place: tuple[str, str], allowed: str) -> Any:
    # A literal takes what equals it, 2.0 for 2.
    if isinstance(value, float):
        raise problem(place, f"is not allowed: must be {allowed}", value)
    return value


class LseSpec(_Part):
    """Base of the returned log-sum-exp, and its value for a row without keys."""

    base: Literal["e", 2] = "e"
    empty: Literal["+inf", "-inf"] = "+inf"

    @field_validator("base", mode="before")
    @classmethod
    def _whole_base(cls, value: Any) -> Any:
        return _no_fraction(value, ("lse", "base"), "'e' or 2")


class KvWriteSpec(_Part):
    """What kv_cache writes by: dtype of the rows, and each cache's rule; `extra_rule` None without a second cache."""

    rows: Literal["bf16", "fp16", "fp32"]
    rule: str = Field(json_schema_extra={"enum": _RULE_NAMES})
    extra_rule: str | None = Field(default=None, json_schema_extra={"enum": _RULE_NAMES})


class IndexWriteSpec(_Part):
    """What index_cache writes by: dtype of the keys, and the rule that their scales and codes follow."""

    rows: Literal["bf16", "fp16", "fp32"]
    rule: str = Field(json_schema_extra={"enum": _INDEX_RULE_NAMES})


class IndexSpec(_Part):
    """The lightning indexer: its heads (8 to 128 in steps of 8), dims of a key, and the format of cached keys.

    `forms` says how calls find keys: in pages (decode), in one piece (ragged prefill), or in candidate blocks of pages;
    `blocks` is pages with scores of blocks, which candidates are chosen by. `accumulation` says which sums of q . k the
    deployment takes of fp8 keys: `fp32`, or `fast`, also those that Hopper's tensor cores make of e4m3 products, which
    keep 13 bits below the largest exponent. It asks for none: where no kernel sums so, sums are fp32. `histogram` says
    that decode steps of few rows count scores by their first digit where they are made, for top-k to begin with.
    """

    heads: int = Field(ge=8, le=MAX_HEADS, multiple_of=8)
    dim: Literal[32, 64, 128]
    keys: str = Field(json_schema_extra={"enum": _INDEX_FORMAT_NAMES})
    forms: tuple[IndexForm, ...] = Field(default=("paged",), min_length=1)
    accumulation: Literal["fp32", "fast"] = "fp32"
    histogram: bool = False

    @field_validator("dim", mode="before")
    @classmethod
    def _whole_dim(cls, value: Any) -> Any:
        return _no_fraction(value, ("index", "dim"), "32, 64 or 128")

    @field_validator("forms", mode="before")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise problem(("index", "forms"), _as_list(value), value)
        if not isinstance(value, list | tuple):
            raise problem(("index", "forms"), "must be a list of names", value)
        twice = next((place for place, form in enumerate(value) if form in value[:place]), None)
        if twice is not None:
            raise problem(("index", "forms", twice), "is listed twice", value[twice])
        return tuple(value)


class DeploymentSpec(_Part):
    """One deployment, complete. Build it with `load_spec` or from keywords; both raise SpecError with every problem."""

    name: str = Field(pattern=NAME_PATTERN)
    model: str = Field(json_schema_extra={"enum": list(MODELS)})
    heads: int = Field(ge=1, le=MAX_HEADS, description="query heads on this rank")
    archs: tuple[str, ...] = Field(min_length=1, json_schema_extra={"items": {"enum": list(ARCHS)}})
    ops: tuple[str, ...] = Field(min_length=1, json_schema_extra={"items": {"enum": list(known_ops())}})
    kv: KvSpec
    extra_kv: ExtraKvSpec | None
    topk: Capacity = Field(description="capacity of the main cache's index row, in columns")
    dims: DimsSpec
    kv_heads: int = Field(
        default=1,
        ge=1,
        le=MAX_HEADS,
        description="KV heads on this rank, each with cache rows of its own and an equal share of the query heads",
    )
    lse: LseSpec = LseSpec()
    determinism: Literal["off", "batch_invariant"] = "off"
    scores: Literal["fp32", "bf16"] | None = Field(
        default=None,
        description="dtype of the scores that indexer_logits gives and topk selects from; None exactly where neither "
        "is an op",
    )
    kv_write: KvWriteSpec | None = Field(
        default=None, description="how kv_cache writes rows; None exactly where kv_cache is no op"
    )
    index: IndexSpec | None = Field(
        default=None,
        description="the lightning indexer; None exactly where neither indexer_logits nor index_cache is an op",
    )
    index_write: IndexWriteSpec | None = Field(
        default=None, description="how index_cache writes keys; None exactly where index_cache is no op"
    )

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**complete(plain_values(data)))
        except ProblemError as error:
            raise InvalidSpecError([error.problem]) from None
        except ValidationError as error:
            raise InvalidSpecError(describe_validation_error(error, type(self))) from None

    @field_validator("archs", "ops", mode="before")
    @classmethod
    def _list_of_words(cls, value: Any, info: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            raise problem((info.field_name,), _as_list(value), value)
        if not isinstance(value, list | tuple):
            raise problem((info.field_name,), "must be a list of names", value)
        check = _arch_name if info.field_name == "archs" else _op_name
        words: list[str] = []
        for index, item in enumerate(value):
            path = (info.field_name, index)
            word = check(path, item)
            if word in words:
                raise problem(path, f"is listed twice (both mean {word})", item)
            words.append(word)
        return tuple(words)

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        dims, record = self.dims, self.kv_format
        self._check_index()
        self._check_kv_heads()
        if dims.d_v > dims.d_qk and record.first_value == 0:
            raise problem(
                ("dims", "d_v"), f"must not exceed d_qk {dims.d_qk}: V is a part of each scored row", dims.d_v
            )
        if dims.d_v != record.d_v:
            raise problem(("dims", "d_v"), f"format {record.format_id} holds d_v {record.d_v}", dims.d_v)
        if self.extra_kv is not None:
            refusal = extra_cache_problem(record, self.extra_kv.record)
            if refusal:
                raise problem(("extra_kv", "format"), f"{refusal}, or extra_kv: none", self.extra_kv.format)
        self._check_writes()
        return self

    def _check_kv_heads(self) -> None:
        if self.kv_heads > 1 and self.model_preset.d_qk is not None:
            text = f"model {self.model} has one KV head, whose rows serve all query heads; others need model: custom"
            raise problem(("kv_heads",), text, self.kv_heads)
        if self.heads % self.kv_heads:
            raise problem(("kv_heads",), f"must divide heads {self.heads}: each KV head has as many", self.kv_heads)

    def _check_index(self) -> None:
        index, write = self.index, self.index_write
        if index is None and any(op in self.ops for op in INDEX_OPS):
            raise problem(("index",), "is empty: leave it out")
        if index is not None and index.keys not in INDEX_FORMATS:
            raise problem(("index", "keys"), "is no index-key format", index.keys, choices=INDEX_FORMATS)
        if index is not None and index.histogram:
            lacking = [op for op in STEP_OPS if op not in self.ops]
            if lacking:
                raise problem(("index", "histogram"), f"decode steps read it: add {', '.join(lacking)} to ops", True)
            if "paged" not in index.forms:
                raise problem(("index", "histogram"), "decode steps read it: add paged to index.forms", True)
        if write is None and INDEX_CACHE_OP in self.ops:
            raise problem(("index_write",), "is empty: leave it out")
        if index is not None and write is not None:
            try:
                index_rule(index_format(index.keys), write.rule)
            except SpecError as error:
                raise problem(("index_write", "rule"), str(error), write.rule) from None

    def _check_writes(self) -> None:
        write, extra = self.kv_write, self.extra_kv
        if write is None:
            if CACHE_OP in self.ops:
                raise problem(("kv_write",), "is empty: leave it out")
            return
        if extra is None and write.extra_rule is not None:
            raise problem(("kv_write", "extra_rule"), "there is no second cache: leave it out", write.extra_rule)
        rules = [("rule", self.kv, write.rule), *([("extra_rule", extra, write.extra_rule)] if extra else [])]
        for key, cache, rule in rules:
            try:
                write_rule(cache.record, str(rule))
            except SpecError as error:
                raise problem(("kv_write", key), str(error), rule) from None

    @property
    def model_preset(self) -> ModelPreset:
        """The preset that the spec names."""
        return model_preset(self.model)

    @property
    def arch_rows(self) -> tuple[Arch, ...]:
        """The architectures to build for, in declared order."""
        return tuple(arch(name) for name in self.archs)

    @property
    def kv_format(self) -> KvFormat:
        """The main cache's format record."""
        return self.kv.record

    @property
    def extra_kv_format(self) -> KvFormat | None:
        """The second cache's format record, None without one."""
        return self.extra_kv.record if self.extra_kv else None

    @property
    def extra_topk(self) -> int:
        """Capacity of the second cache's index row, in columns; 0 without one."""
        return self.extra_kv.topk if self.extra_kv else 0

    @property
    def most_selected(self) -> int:
        """Slots that a top-k may have: of a selection of tokens, or of candidate blocks where these are scored."""
        scores_blocks = self.index is not None and "blocks" in self.index.forms
        return max(self.selected_topk, MAX_CANDIDATE_BLOCKS if scores_blocks else 0)

    @property
    def selected_topk(self) -> int:
        """Capacity, in columns, of the index rows that topk writes.

        They are the second cache's where there is one: the first then holds the window, which nobody selects.
        """
        return self.extra_kv.topk if self.extra_kv else self.topk

    @property
    def sm_scale(self) -> float:
        """The softmax scale that an op uses unless the call gives one."""
        scale = self.model_preset.sm_scale
        return float(self.dims.d_qk**-0.5) if scale is None else scale

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that `load_spec` turns back into an equal spec."""
        data = self.model_dump(mode="json")
        data["extra_kv"] = data["extra_kv"] or NO_EXTRA_CACHE
        for key in READ_BY:
            if data[key] is None:
                del data[key]
        if "index" in data and not data["index"]["histogram"]:
            del data["index"]["histogram"]
        if "index" in data and INDEXER_OP not in self.ops:
            for key in INDEXER_KEYS:
                data["index"].pop(key, None)
        if self.kv_heads == 1:
            del data["kv_heads"]
        if "kv_write" in data and data["kv_write"]["extra_rule"] is None:
            del data["kv_write"]["extra_rule"]
        return data

    def to_yaml(self) -> str:
        """The complete spec as YAML."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, default_flow_style=None)

    def to_json(self) -> str:
        """The complete spec as one line of JSON."""
        return json.dumps(self.to_mapping())

    def replace(self, **changes: Any) -> DeploymentSpec:
        """A validated copy with some top-level keys changed."""
        return DeploymentSpec(**{**self.to_mapping(), **changes})

    def only(self, *ops: str) -> DeploymentSpec:
        """A copy that declares some ops, without what only others read."""
        kept = {key: value for key, value in self.to_mapping().items() if set(ops) & set(READ_BY.get(key, ops))}
        if "index" in kept and INDEXER_OP not in ops:
            for key in INDEXER_KEYS:
                kept["index"].pop(key, None)
        if "index" in kept and not set(STEP_OPS) <= set(ops):
            kept["index"].pop("histogram", None)
        return DeploymentSpec(**{**kept, "ops": list(ops)})


def load_spec(source: str | os.PathLike[str] | Mapping[str, Any] | DeploymentSpec) -> DeploymentSpec:
    """A spec from a file, a shipped spec's name, a mapping, or as it is.

    SpecError lists every problem with file, line, key path, value, what is allowed and the nearest valid choice. A file
    without `name` is named after its stem, where that is a valid name; otherwise the name is `<model>_h<heads>`.
    """
    if isinstance(source, DeploymentSpec):
        return source
    if isinstance(source, Mapping):
        bad = [key for key in source if not isinstance(key, str)]
        if bad:
            raise SpecError(f"spec: keys must be text, found {show(bad[0])} of type {type(bad[0]).__name__}")
        return DeploymentSpec(**source)
    if not isinstance(source, str | os.PathLike):
        raise SpecError(f"spec: expected a path, a mapping or a DeploymentSpec, found {type(source).__name__}")
    path = resolve_spec_path(os.fspath(source))
    return _from_source(read_spec_source(path), default_name=path.stem)


def parse_spec(text: str, label: str = "<spec>") -> DeploymentSpec:
    """A spec from YAML (or JSON) text; `label` stands for the file in messages."""
    return _from_source(parse_spec_text(text, label), default_name=None)


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec as users write it: what presets fill is optional."""
    schema = DeploymentSpec.model_json_schema()
    for part in ("KvSpec", "ExtraKvSpec", "KvWriteSpec", "IndexSpec", "IndexWriteSpec"):
        schema["$defs"][part].pop("required")
    schema["$defs"]["DimsSpec"].pop("required")
    schema["required"] = ["model", "heads", "archs", "ops"]
    properties = schema["properties"]
    properties["kv"] = {"anyOf": [{"$ref": "#/$defs/KvSpec"}, {"enum": _FORMAT_NAMES}]}
    extra = {"enum": [NO_EXTRA_CACHE, *_FORMAT_NAMES]}
    properties["extra_kv"] = {"anyOf": [{"$ref": "#/$defs/ExtraKvSpec"}, extra]}
    return schema


def _from_source(source: SpecSource, default_name: str | None) -> DeploymentSpec:
    data = dict(source.data)
    if default_name is not None and re.fullmatch(NAME_PATTERN, default_name):
        data.setdefault("name", default_name)
    try:
        return DeploymentSpec(**data)
    except InvalidSpecError as error:
        raise InvalidSpecError(error.problems, source) from None


def _as_list(word: str) -> str:
    return f"must be a list: write [{word}]" if word.strip() else "must be a list of names"


def _arch_name(path: tuple[str, int], item: Any) -> str:
    try:
        return arch(item).name
    except SpecError as error:
        raise problem(path, str(error), item) from None


def _op_name(path: tuple[str, int], item: Any) -> str:
    if isinstance(item, str) and item in known_ops():
        return item
    raise problem(path, "is no op", item, choices=known_ops())
