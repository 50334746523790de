"""Which loaded kernels serve a call that names no deployment: those that were given, or ones that are loaded for it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import torch

from dsagen.arch import arch_for_capability
from dsagen.errors import GuardError
from dsagen.runtime.api import Kernels, load
from dsagen.spec import DeploymentSpec
from dsagen.spec_problems import MAX_TOPK

# What decides the deployment that is loaded for a call, and what decides whether kernels can serve it.
LoadKey = TypeVar("LoadKey", bound=Hashable)
CallKey = TypeVar("CallKey", bound=Hashable)


class OpDeployments(ABC, Generic[LoadKey, CallKey]):
    """Loaded kernels with an op, by what they serve. Safe to use from several threads."""

    op: str

    def __init__(self) -> None:
        self._given: list[Kernels] = []
        self._loaded: dict[tuple[LoadKey, str], Kernels] = {}
        self._found: dict[tuple[CallKey, torch.device], Kernels] = {}
        self._lock = threading.Lock()
        # Another one whenever other kernels may serve a call than before.
        self.version = 0

    @abstractmethod
    def load_key(self, call: CallKey) -> LoadKey:
        """What a call asks of a deployment that is loaded for it."""

    @abstractmethod
    def serves(self, spec: DeploymentSpec, call: CallKey) -> bool:
        """Whether kernels of a spec can take the call."""

    @abstractmethod
    def derive(self, wanted: LoadKey, arch: str) -> DeploymentSpec:
        """The deployment that calls imply. SpecError for what is not built."""

    def use(self, kernels: Kernels) -> None:
        """Serve the calls that these kernels can serve with them, the latest first; they may be prepared and frozen."""
        if not isinstance(kernels, Kernels) or self.op not in kernels.spec.ops:
            raise GuardError(
                f"[T-20] use: kernels: expected loaded kernels with {self.op} among their ops: dsagen.load"
            )
        with self._lock:
            self._given.insert(0, kernels)
            self._found.clear()
            self.version += 1

    def forget(self) -> None:
        """Drop all kernels, those that were given and those that were loaded."""
        with self._lock:
            self._given.clear()
            self._loaded.clear()
            self._found.clear()
            self.version += 1

    @property
    def given(self) -> tuple[Kernels, ...]:
        """What was passed to `use`, the latest first."""
        return tuple(self._given)

    def kernels_for(self, call: CallKey, device: torch.device, named: str = "q") -> Kernels:
        """The kernels for a call. Without given ones a deployment is derived from the call and loaded.

        `named` is the tensor whose device it is. Raises what dsagen.load raises, with what the call asks for.
        """
        found = self._found.get((call, device))
        if found is None:
            with self._lock:
                given = (k for k in self._given if k.device.type == device.type and self.serves(k.spec, call))
                found = next(given, None) or self._load(self.load_key(call), device, named)
                self._found[call, device] = found
        return found

    def _load(self, wanted: LoadKey, device: torch.device, named: str) -> Kernels:
        if device.type != "cuda":
            raise GuardError(
                f"[T-20] {named}: on {device}: expected a CUDA device; for the emulator load the spec with "
                "device='emulator' and pass the kernels to use()"
            )
        arch = arch_for_capability(*torch.cuda.get_device_capability(device)).name
        found = self._loaded.get((wanted, arch))
        if found is None:
            found = self._loaded[wanted, arch] = load(self.derive(wanted, arch), device=device)
        return found


class Need(NamedTuple):
    """What a call of sparse decode asks of a deployment; formats are ids of KV formats, `extra` None without a second
    cache.
    """

    heads: int
    kv: str
    extra: str | None
    batch_invariant: bool


class Deployments(OpDeployments[Need, tuple[Need, int, int]]):
    """Kernels of sparse decode; a call is its need and the widths of its lists."""

    op = "sparse_decode"

    def find(self, need: Need, topk: int, extra_topk: int, device: torch.device) -> Kernels:
        """As kernels_for."""
        return self.kernels_for((need, topk, extra_topk), device)

    def load_key(self, call: tuple[Need, int, int]) -> Need:
        """The need: there is room for lists of any width."""
        return call[0]

    def derive(self, wanted: Need, arch: str) -> DeploymentSpec:
        """See derived_spec."""
        return derived_spec(wanted, arch)

    def serves(self, spec: DeploymentSpec, call: tuple[Need, int, int]) -> bool:
        """Whether heads, formats, widths and flash_mla's conventions are the spec's."""
        need, topk, extra_topk = call
        extra = spec.extra_kv.format_id if spec.extra_kv else None
        return (
            (spec.heads, spec.kv.format_id) == (need.heads, need.kv)
            and need.extra in (extra, None)
            and topk <= spec.topk
            and extra_topk <= spec.extra_topk
            and (spec.lse.base, spec.lse.empty) == ("e", "+inf")
            and (spec.determinism == "batch_invariant") == need.batch_invariant
        )


def derived_spec(need: Need, arch: str) -> DeploymentSpec:
    """The deployment that a call implies, with room for any width of index rows. SpecError for what is not built."""
    extra = {"format": need.extra, "topk": MAX_TOPK} if need.extra else "none"
    return DeploymentSpec(
        name="flash_mla",
        model="custom",
        heads=need.heads,
        archs=[arch],
        ops=[Deployments.op],
        kv=need.kv,
        extra_kv=extra,
        topk=MAX_TOPK,
        determinism="batch_invariant" if need.batch_invariant else "off",
    )


class SelectionNeed(NamedTuple):
    """What a call of top-k asks: dtype of the scores, as specs have it, and slots of a row."""

    scores: str
    k: int


class Selections(OpDeployments[str, SelectionNeed]):
    """Kernels of top-k, by the dtype of scores."""

    op = "topk"

    def load_key(self, call: SelectionNeed) -> str:
        """The dtype: there is room for any number of slots."""
        return call.scores

    def derive(self, wanted: str, arch: str) -> DeploymentSpec:
        """Top-k alone."""
        return DeploymentSpec(
            name="topk_drop_in", model="v32", heads=1, archs=[arch], ops=[self.op], topk=MAX_TOPK, scores=wanted
        )

    def serves(self, spec: DeploymentSpec, call: SelectionNeed) -> bool:
        """Whether the spec's scores and capacity take the call."""
        return spec.scores == call.scores and call.k <= spec.selected_topk


class LogitsNeed(NamedTuple):
    """What a call of the indexer asks: heads, dims, format and form of keys, dtype of scores, as specs have them."""

    heads: int
    dim: int
    keys: str
    scores: str
    form: str = "paged"


class Indexers(OpDeployments[LogitsNeed, LogitsNeed]):
    """Kernels of the indexer's logits."""

    op = "indexer_logits"

    def load_key(self, call: LogitsNeed) -> LogitsNeed:
        """All of it."""
        return call

    def derive(self, wanted: LogitsNeed, arch: str) -> DeploymentSpec:
        """The indexer alone, with the sums of deep_gemm."""
        index = {
            "heads": wanted.heads,
            "dim": wanted.dim,
            "keys": wanted.keys,
            "forms": [wanted.form],
            "accumulation": "fast",
        }
        return DeploymentSpec(
            name="deep_gemm", model="v32", heads=1, archs=[arch], ops=[self.op], index=index, scores=wanted.scores
        )

    def serves(self, spec: DeploymentSpec, call: LogitsNeed) -> bool:
        """Whether the spec's indexer is the call's, with sums of any kind."""
        index = spec.index
        if index is None or call.form not in index.forms:
            return False
        return LogitsNeed(index.heads, index.dim, index.keys, str(spec.scores), call.form) == call
