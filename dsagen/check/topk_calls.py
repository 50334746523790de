"""How checks and benchmarks call the op: the one place that knows which promises it takes and whether it has plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dsagen.spec import DeploymentSpec

# What a call promises about equal scores and order, weakest first.
# off: some k that no other exceeds; set: among equals the lower indices; order: these, ascending.
OFF, SET, ORDER = MODES = ("off", "set", "order")
_MODE_OPTION = "determinism"


class TopkKernels(Protocol):
    """What is needed of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    @property
    def topk(self) -> Callable[..., Tensor]: ...  # noqa: D102
    def topk_slugs(self, scores: Tensor, *, k: int, starts: Tensor | None = None) -> tuple[str, ...]: ...  # noqa: D102


@dataclass(frozen=True)
class TopkCalls:
    """Calls of one shape on one stream, with the plan that they share; `plan` is None where the op needs none."""

    kernels: TopkKernels
    k: int
    run: Callable[..., Tensor]
    plan: Any

    def __call__(self, scores: Tensor, **options: Any) -> Tensor:
        """Run the op on the current stream; options are those of `Kernels.topk`."""
        return self.run(scores, **options)

    def slugs(self, scores: Tensor, starts: Tensor | None = None) -> tuple[str, ...]:
        """The kernels that a call with these tensors takes, in the order of their launches."""
        return self.kernels.topk_slugs(scores, k=self.k, starts=starts)


def offered_modes(topk: Callable[..., Tensor]) -> tuple[str, ...]:
    """Modes that a call of the op may ask for. An op that takes none has the strongest only."""
    return MODES if _MODE_OPTION in inspect.signature(topk).parameters else (MODES[-1],)


def topk_calls(kernels: TopkKernels, rows: int, max_cols: int, k: int, mode: str) -> TopkCalls:
    """Calls with up to `max_cols` columns in each of `rows` rows; ValueError for a mode that is not offered."""
    offered = offered_modes(kernels.topk)
    if mode not in offered:
        raise ValueError(f"mode {mode!r} is not offered: {', '.join(offered)}")
    options: dict[str, Any] = {_MODE_OPTION: mode} if len(offered) > 1 else {}
    make_plan = getattr(kernels, "plan_topk", None)
    plan = None if make_plan is None else make_plan(rows, max_cols, k)
    if plan is not None:
        options["plan"] = plan

    def run(scores: Tensor, **others: Any) -> Tensor:
        return kernels.topk(scores, k=k, **options, **others)

    return TopkCalls(kernels, k, run, plan)
