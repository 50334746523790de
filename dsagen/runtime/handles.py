"""Names of loaded kernels, by which an op of torch, whose arguments are tensors and plain values, finds them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import ref

from dsagen.errors import GuardError

if TYPE_CHECKING:
    from dsagen.runtime.api import Kernels

# Plain references, since a look-up is part of what a call costs.
_LOADED: dict[str, ref[Kernels]] = {}
_LOCK = threading.Lock()


def register(kernels: Kernels, archs: tuple[str, ...], driver: str, schemas: Mapping[str, str]) -> str:
    """A name for kernels that have just been loaded. `schemas` are those of torch's ops, by name.

    It follows from the spec, so that code that was compiled in one process and kept means the same in the next: only
    kernels of the same spec that are loaded at the same time are numbered. It follows from the ops as well: what a
    compiler has kept for ops that took other arguments is not found again.
    """
    ops = (name + schema for name, schema in sorted(schemas.items()))
    text = "\0".join((kernels.spec.to_json(), *archs, driver, *ops))
    stem = f"{kernels.spec.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with _LOCK:
        name = next(name for number in itertools.count() if _living(name := f"{stem}#{number}") is None)
        _LOADED[name] = ref(kernels)
    return name


def find(name: str) -> Kernels:
    """The loaded kernels of that name, or others of the same spec; GuardError when there are none."""
    found = _living(name)
    if found is not None:
        return found
    stem = name.partition("#")[0] + "#"
    with _LOCK:
        same = [kernels for other in sorted(_LOADED) if other.startswith(stem) and (kernels := _living(other))]
    if not same:
        raise GuardError(
            f"[T-19] kernels: none that are loaded have the handle {name!r}: load the spec with dsagen.load in this "
            "process, keep what it returns, and pass its `handle`; a program that was exported with another dsagen or "
            "spec has to be exported anew"
        )
    return same[0]


def _living(name: str) -> Kernels | None:
    found = _LOADED.get(name)
    return None if found is None else found()
