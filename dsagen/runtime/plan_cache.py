"""Plans that calls without a plan share, per shape, device and stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_PLANS = 64
MAX_WORKSPACE_BYTES = 256 << 20


class PlanKey(NamedTuple):
    """What decides a cached plan of sparse decode; `stream` is a raw handle, `num_splits` None unless it is given."""

    batch: int
    s_q: int
    topk: int
    extra_topk: int
    ordinal: int
    stream: int
    num_splits: int | None = None


class HoldsWorkspace(Protocol):
    """A plan, as far as its place in the cache goes."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that it holds."""


Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan", bound=HoldsWorkspace)


class PlanCache(Generic[Key, Plan]):
    """The plans used last, within a count and a sum of workspace bytes. Not locked: its owner is.

    `dropped` is called when plans serve their key no more, for what else may hold them.
    """

    def __init__(
        self,
        max_plans: int = MAX_PLANS,
        max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
        dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_plans, self._max_workspace_bytes, self._dropped = max_plans, max_workspace_bytes, dropped
        self._plans: OrderedDict[Key, Plan] = OrderedDict()
        self._pinned: dict[Key, Plan] = {}
        self._taken: dict[tuple[Key, int], Plan] = {}

    def get(self, key: Key) -> Plan | None:
        """The plan of that key, which then counts as the one used last."""
        if key in self._pinned:
            return self._pinned[key]
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def add(self, key: Key, plan: Plan) -> None:
        """Keep a plan, at the cost of those not used for longest."""
        self._plans[key] = plan
        held_bytes = sum(kept.workspace_bytes for kept in self._plans.values())
        while len(self._plans) > 1 and (len(self._plans) > self._max_plans or held_bytes > self._max_workspace_bytes):
            _, dropped = self._plans.popitem(last=False)
            held_bytes -= dropped.workspace_bytes
            self._dropped()

    def take(self, key: Key, capture: int) -> Plan | None:
        """The plan of a key for good, for the calls of one captured graph and nobody else; None without one."""
        if (key, capture) not in self._taken and key in self._plans:
            self._taken[key, capture] = self._plans.pop(key)
            self._dropped()
        return self._taken.get((key, capture))

    def pin(self, key: Key) -> None:
        """Keep a plan for good: a captured graph holds its workspace's address."""
        if key in self._plans:
            self._pinned[key] = self._plans.pop(key)
