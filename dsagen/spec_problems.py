"""Problems of a spec, in words: key path, value found, what is allowed, the nearest valid choice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsagen.errors import SpecError
from dsagen.spec_source import KeyPath, SpecSource

MAX_HEADS = 128
MAX_TOPK = 1 << 20
MAX_ROW_ELEMENTS = 65535

_MAX_SHOWN_CHARS = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+\Z|<<\Z", re.ASCII)


class _Nothing:
    """Stands for no value; unpickled it is the same object again."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()  # no value was written at the key

# Bounds by the key path, or by its last word, the step between values, and what the number counts.
_RANGES: Mapping[str, tuple[int, int, int, str]] = {
    "heads": (1, MAX_HEADS, 1, "query heads on this rank"),
    "kv_heads": (1, MAX_HEADS, 1, "KV heads on this rank"),
    "index.heads": (8, MAX_HEADS, 8, "index heads, in steps of 8"),
    "topk": (1, MAX_TOPK, 1, "columns of the index row"),
    "d_qk": (1, MAX_ROW_ELEMENTS, 1, "elements of a scored row"),
    "d_v": (1, MAX_ROW_ELEMENTS, 1, "elements of a summed row"),
}

# What users look for here but kernels take at run time.
_RUN_TIME_KEYS = frozenset(
    {"page_size", "page_stride", "block_size", "batch", "batch_size", "s_q", "next_n", "seq_len", "num_pages",
     "sm_scale", "num_splits", "topk_length", "attn_sink"}
)  # fmt: skip
# What other stacks call the number of KV heads.
_KV_HEAD_KEYS = frozenset({"h_kv", "h_k", "num_kv_heads", "n_kv_heads", "num_key_value_heads"})


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a spec; `value` is shown unless it is NOTHING."""

    path: KeyPath
    text: str
    value: Any = NOTHING

    def message(self, source: SpecSource | None = None) -> str:
        """One line, with file and line when the source is known."""
        where = source.where(self.path) if source else "spec"
        key = dotted(self.path)
        shown = "" if self.value is NOTHING else f" = {show(self.value)}"
        return f"{where}: {key}{shown}: {self.text}" if key else f"{where}: {self.text}"


class ProblemError(SpecError):
    """Raised inside validation; carries its problem to the collected error."""

    def __init__(self, found: Problem) -> None:
        self.problem = found
        super().__init__(found.message())

    def __reduce__(self) -> tuple[type[ProblemError], tuple[Problem]]:
        return type(self), (self.problem,)


def problem(path: KeyPath, text: str, value: Any = NOTHING, choices: Iterable[str] = ()) -> ProblemError:
    """An error to raise for one key; `choices` adds the list of what is allowed and the nearest of them."""
    return ProblemError(Problem(path, text + _allowed(value, tuple(choices)), value))


def dotted(path: KeyPath) -> str:
    """`kv.format`, `archs[1]`."""
    text = ""
    for part in path:
        word = part if isinstance(part, int) or _PLAIN_KEY.match(part) else show(part)
        text += f"[{word}]" if isinstance(part, int) else f".{word}" if text else str(word)
    return text


def show(value: Any) -> str:
    """A value on one line, cut to a readable length."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)  # YAML has lists
    except Exception:  # an int of more digits than Python prints, a foreign object, a list that holds itself
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Every error of a validation as a problem in our words."""
    details = error.errors(include_url=False)
    # A list without a good item is told as empty too, beside what is wrong with those that it has.
    inside = {detail["loc"][:-1] for detail in details}
    details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]
    problems = [_describe(detail, model) for detail in details]
    # dims follow from the format: when they are missing, the reason is among the others.
    return [p for p in problems if p.path != ("dims",) or p.value is not NOTHING] or problems


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> Problem:
    path, value, kind = tuple(detail["loc"]), detail["input"], detail["type"]
    context = detail.get("ctx", {})
    raised = context.get("error")
    if isinstance(raised, ProblemError):
        return raised.problem
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(str(path[-1]), _fields_at(path[:-1], model)))
    if kind == "missing":
        choices = _allowed("", _choices_at(path, model))
        return Problem(path, f"is missing{_range(_ranged(path), NOTHING)}{choices}")
    if _ranged(path) in _RANGES:
        return Problem(path, f"is not allowed{_range(_ranged(path), value)}", value)
    if kind == "literal_error":
        return Problem(path, f"is not allowed: must be {context['expected']}{_near_literal(value, context)}", value)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(path, f"must be a mapping with the keys {', '.join(_fields_at(path, model))}", value)
    if kind == "string_pattern_mismatch":
        return Problem(path, "must be 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-', the first a letter or digit", value)
    if kind == "too_short":
        return Problem(path, f"must list at least one{_allowed('', _choices_at(path, model))}", value)
    choices = _allowed(value, _choices_at(path, model))
    return Problem(path, f"is not allowed: {detail['msg'][:1].lower()}{detail['msg'][1:]}{choices}", value)


def _unknown_key(key: str, fields: tuple[str, ...]) -> str:
    if key in _KV_HEAD_KEYS:
        return "is no key here: the KV heads of this rank are `kv_heads`, 1 unless given"
    if key in _RUN_TIME_KEYS:
        return "is decided at run time and needs no kernel of its own: leave it out"
    return f"unknown key{_allowed(key, fields)}"


def _allowed(value: Any, choices: tuple[str, ...]) -> str:
    if not choices:
        return ""
    near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    return f"{f' (did you mean {near[0]}?)' if near else ''}: allowed are {', '.join(choices)}"


def _ranged(path: KeyPath) -> str:
    """The name under which a key's bounds are held, if it has any."""
    whole = dotted(path)
    return whole if whole in _RANGES or not path else str(path[-1])


def _range(key: str, value: Any) -> str:
    if key not in _RANGES:
        return ""
    low, high, step, what = _RANGES[key]
    text = f": must be an integer of {low} .. {high} ({what})"
    if isinstance(value, int) and not isinstance(value, bool):
        # Of two as near the larger one, which has room for what was asked.
        text += f"; the nearest is {min(max((value + step // 2) // step * step, low), high)}"
    if isinstance(value, str) and value.isascii() and value.isdigit() and int(value) in range(low, high + 1, step):
        text += f": write {int(value)}"
    return text


def _near_literal(value: Any, context: Mapping[str, Any]) -> str:
    choices = [word.strip(" '") for word in str(context["expected"]).replace(" or ", ",").split(",")]
    # An infinity by other spellings, .inf of YAML or of Python, has a sign even where none is written.
    wanted = re.sub(r"^([-+]?)\.?inf(?:inity)?\Z", lambda found: f"{found[1] or '+'}inf", str(value).lower())
    near = difflib.get_close_matches(wanted, choices, n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _choices_at(path: KeyPath, model: type[BaseModel]) -> tuple[str, ...]:
    """The words that a key may have, or a list's items; none where any may be."""
    *outer, last = path
    field = _part_at(tuple(outer), model).model_fields.get(str(last))
    if field is None:
        return ()
    extra: Any = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    words = extra.get("enum") or extra.get("items", {}).get("enum")
    if words is None and get_origin(field.annotation) is Literal:
        words = get_args(field.annotation)
    return tuple(str(word) for word in words or ())


def _fields_at(path: KeyPath, model: type[BaseModel]) -> tuple[str, ...]:
    """The keys that a mapping at this path may have."""
    return tuple(_part_at(path, model).model_fields)


def _part_at(path: KeyPath, model: type[BaseModel]) -> type[BaseModel]:
    """The model of a mapping at this path; BaseModel, which has no fields, where there is none."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            return BaseModel
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), BaseModel)
    return model
