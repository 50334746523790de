"""Entrances of torch's ops into the launcher in C: a call that is like one before it is launched without any Python.

torch calls an entrance with an op's arguments. It finds the tables of the loaded kernels by their handle and repeats
the call from there. What the tables do not know, and every call without a launcher in C, runs the function in Python.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsagen.runtime.index_cache import FORMS as INDEX_FORMS
from dsagen.runtime.indexer import FORM as LOGITS_FORM
from dsagen.runtime.indexer_blocks import FORM as BLOCKS_FORM
from dsagen.runtime.indexer_candidates import FORM as CANDIDATES_FORM
from dsagen.runtime.indexer_ragged import FORM as RAGGED_FORM
from dsagen.runtime.kv_cache import FORMS as CACHE_FORMS
from dsagen.runtime.launch import CallForm
from dsagen.runtime.native import load_module
from dsagen.runtime.sparse_decode import FORM as DECODE_FORM
from dsagen.runtime.topk import FORM as TOPK_FORM

# What an entrance does with a parameter that has no place in a call: the kernels' name, or one that must be left out.
_HANDLE, _ABSENT = -1, -2


@dataclass(frozen=True)
class OpCall:
    """How an op's arguments make a call of a form: its scalars in order, with what they are when they are not given.

    `elsewhere` are parameters that the form knows under another name, so that calls with them are left to Python.
    """

    form: CallForm
    scalars: Mapping[str, Any]
    elsewhere: frozenset[str] = field(default=frozenset())

    def defaults(self) -> tuple[Any, ...]:
        """The values of a call that gives none."""
        return (*(None for _ in self.form.tensors), *self.scalars.values())

    def place(self, parameter: str) -> int:
        """Where the value of an op's parameter goes; KeyError for a parameter that nobody knows."""
        if parameter == "kernels":
            return _HANDLE
        if parameter in self.elsewhere:
            return _ABSENT
        places = {name: place for place, name in enumerate((*self.form.tensors, *self.scalars))}
        return places[parameter]


_CHOSEN = "page_table stands for candidate_blocks"
_DECODE_CALL = OpCall(DECODE_FORM, {"softmax_scale": None, "num_splits": None})
# By op, of which the out variants are calls as well.
OP_CALLS: Mapping[str, OpCall] = {
    "sparse_decode": _DECODE_CALL,
    "sparse_decode_caches": _DECODE_CALL,
    "topk": OpCall(
        TOPK_FORM,
        {"k": None, "page_size": None, "drop_neg_inf": False, "determinism": "set", _CHOSEN: False},
        frozenset({"candidate_blocks"}),
    ),
    "indexer_logits": OpCall(LOGITS_FORM, {"max_seq_len": None, "unscored_up_to": 0, "fill_neg_inf": False}),
    "indexer_logits_blocks": OpCall(BLOCKS_FORM, {"max_seq_len": None, "unscored_up_to": 0, "fill_neg_inf": False}),
    "indexer_logits_ragged": OpCall(RAGGED_FORM, {"max_window": None, "unscored_up_to": 0, "fill_neg_inf": False}),
    "indexer_logits_candidates": OpCall(CANDIDATES_FORM, {"block_size": 8, "max_seq_len": None}),
    "kv_write": OpCall(CACHE_FORMS["write"], {"extra": False}),
    "kv_read": OpCall(CACHE_FORMS["read"], {"extra": False, "rows": None}),
    "kv_convert": OpCall(CACHE_FORMS["convert"], {"extra": False}),
    "index_write": OpCall(INDEX_FORMS["write"], {}),
    "index_gather": OpCall(INDEX_FORMS["gather"], {"rows": None}),
}


def base_of(op: str) -> str:
    """The op whose out variant this is, or itself."""
    return op.removesuffix("_out")


class Entrances:
    """The entrances of a library's ops. Safe to use from several threads.

    `implement(op, function, key)` gives torch a function for an op and a dispatch key; `functions` has the one in
    Python of each op, out variants included.
    """

    def __init__(self, implement: Callable[[str, Any, str], None], functions: Mapping[str, Callable[..., Any]]) -> None:
        self._implement, self._functions = implement, functions
        self._tables: dict[str, dict[str, Any]] = {op: {} for op in OP_CALLS}
        self._open: set[str] = set()
        self._lock = threading.Lock()

    def serve(self, kernels: Any, handle: str, key: str, tables: Mapping[str, Any]) -> None:
        """Let calls with a handle find these tables of loaded kernels, by op, for as long as the kernels live.

        `key` is the dispatch key of the device type whose tensors they take. Of a tuple of tables the first that knows
        a call has it; one of None is left out.
        """
        mine = {op: table for op, table in tables.items() if table is not None}
        if not mine:
            return
        with self._lock:
            for op, table in mine.items():
                self._tables[op][handle] = table
            if key not in self._open:
                self._open.add(key)
                for op in self._functions:
                    # An op without a form of its calls has none.
                    if base_of(op) in OP_CALLS:
                        self._implement(op, self._entrance(op), key)
        weakref.finalize(kernels, self._leave, handle, mine).atexit = False

    def _entrance(self, op: str) -> Any:
        base, function = base_of(op), self._functions[op]
        call = OP_CALLS[base]
        schema = getattr(torch.ops.dsagen, op).default._schema
        parameters = tuple((argument.name, call.place(argument.name)) for argument in schema.arguments)
        return load_module().Entrance(self._tables[base], function, parameters, call.defaults(), len(schema.returns))

    def _leave(self, handle: str, mine: Mapping[str, Any]) -> None:
        for op, table in mine.items():
            # The handle may be another's by now.
            if self._tables[op].get(handle) is table:
                del self._tables[op][handle]
