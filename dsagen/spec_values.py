"""What a spec may hold: text, numbers, lists and mappings, of a size that a message can show.

A mapping given from Python can hold anything. Here every other kind of value becomes a problem with its key path, so
that nothing later compares, prints or descends into an object that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from dsagen.spec_problems import problem, show
from dsagen.spec_source import MAX_SPEC_DEPTH, KeyPath

MAX_TEXT_CHARS = 256
# As many digits as a number in YAML may have here.
MAX_INTEGER = 10**18 - 1


def plain_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec's mapping in plain Python types; ProblemError for the first value that no spec holds."""
    return _mapping(data, ())


def _plain(value: Any, path: KeyPath) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise problem(
                path, f"is an integer of {value.bit_length()} bits: no number in a spec has more than 18 digits"
            )
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping | list | tuple):
        if len(path) >= MAX_SPEC_DEPTH:
            raise problem(path[:1], f"is nested deeper than {MAX_SPEC_DEPTH} levels")
        return _mapping(value, path) if isinstance(value, Mapping) else _list(value, path)
    raise problem(path, f"is of type {type(value).__name__}; a spec holds text, numbers, lists and mappings")


def _list(value: list[Any] | tuple[Any, ...], path: KeyPath) -> list[Any] | tuple[Any, ...]:
    items = [_plain(item, (*path, index)) for index, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _mapping(value: Mapping[Any, Any], path: KeyPath) -> dict[str, Any]:
    plain = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise problem(path, f"keys must be text, found {show(key)} of type {type(key).__name__}")
        word = _text(key, path)
        plain[word] = _plain(item, (*path, word))
    return plain


def _text(value: str, path: KeyPath) -> str:
    text = str.__str__(value)
    if len(text) > MAX_TEXT_CHARS:
        raise problem(path, f"is a text of {len(text)} characters: no text in a spec has more than {MAX_TEXT_CHARS}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise problem(path, "holds a surrogate, which is no character", text)
    return text
