"""Which loaded kernels serve a call that names no deployment: those that were given, or ones that are loaded for it."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from dsagen.arch import arch_for_capability
from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels, load
from dsagen.spec import DeploymentSpec
from dsagen.spec_problems import MAX_TOPK

_OP = "sparse_decode"


class Need(NamedTuple):
    """What a call asks of a deployment; formats are ids of KV formats, `extra` None without a second cache."""

    heads: int
    kv: str
    extra: str | None
    batch_invariant: bool


class Deployments:
    """Loaded kernels by what they serve. Safe to use from several threads."""

    def __init__(self) -> None:
        self._given: list[Kernels] = []
        self._loaded: dict[tuple[Need, str], Kernels] = {}
        self._found: dict[tuple[Need, torch.device, int, int], Kernels] = {}
        self._lock = threading.Lock()

    def use(self, kernels: Kernels) -> None:
        """Serve the calls that these kernels can serve with them, the latest first; they may be prepared and frozen."""
        if not isinstance(kernels, Kernels) or _OP not in kernels.spec.ops:
            raise GuardError(f"[T-20] use: kernels: expected loaded kernels with {_OP} among their ops: dsagen.load")
        with self._lock:
            self._given.insert(0, kernels)
            self._found.clear()

    def forget(self) -> None:
        """Drop all kernels, those that were given and those that were loaded."""
        with self._lock:
            self._given.clear()
            self._loaded.clear()
            self._found.clear()

    def find(self, need: Need, topk: int, extra_topk: int, device: torch.device) -> Kernels:
        """The kernels for a call. Without given ones a deployment is derived from the call and loaded.

        Raises what dsagen.load raises, with what the call asks for.
        """
        key = (need, device, topk, extra_topk)
        found = self._found.get(key)
        if found is None:
            with self._lock:
                given = (k for k in self._given if _serves(k, need, topk, extra_topk, device))
                found = self._found[key] = next(given, None) or self._load(need, device)
        return found

    def _load(self, need: Need, device: torch.device) -> Kernels:
        if device.type != "cuda":
            raise GuardError(
                f"[T-20] q: on {device}: expected a CUDA device; for the emulator load the spec with device='emulator' "
                "and pass the kernels to use()"
            )
        arch = arch_for_capability(*torch.cuda.get_device_capability(device)).name
        found = self._loaded.get((need, arch))
        if found is None:
            found = self._loaded[need, arch] = load(derived_spec(need, arch), device=device)
        return found


def derived_spec(need: Need, arch: str) -> DeploymentSpec:
    """The deployment that a call implies, with room for any width of index rows. SpecError for what is not built."""
    extra = {"format": need.extra, "topk": MAX_TOPK} if need.extra else "none"
    return DeploymentSpec(
        name="flash_mla",
        model="custom",
        heads=need.heads,
        archs=[arch],
        ops=[_OP],
        kv=need.kv,
        extra_kv=extra,
        topk=MAX_TOPK,
        determinism="batch_invariant" if need.batch_invariant else "off",
    )


def _serves(kernels: Kernels, need: Need, topk: int, extra_topk: int, device: torch.device) -> bool:
    spec = kernels.spec
    extra = spec.extra_kv.format_id if spec.extra_kv else None
    extra_room = spec.extra_kv.topk if spec.extra_kv else 0
    return (
        (spec.heads, spec.kv.format_id) == (need.heads, need.kv)
        and need.extra in (extra, None)
        and topk <= spec.topk
        and extra_topk <= extra_room
        # flash_mla's conventions.
        and (spec.lse.base, spec.lse.empty) == ("e", "+inf")
        and (spec.determinism == "batch_invariant") == need.batch_invariant
        and kernels.device.type == device.type
    )
