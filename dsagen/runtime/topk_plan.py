"""Plans of top-k: the workspace that rows need which blocks share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch

from dsagen.errors import DsagenError, GuardError
from dsagen.families.topk.guards import WORKSPACE_GUARD
from dsagen.families.topk.op import Split
from dsagen.guard import check
from dsagen.plan import KernelPlan
from dsagen.runtime.blocks import Number
from dsagen.runtime.device_memory import no_memory
from dsagen.runtime.driver import Driver
from dsagen.runtime.launch import OpLaunches, OpRoutes
from dsagen.runtime.step_counts import counted_launches
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    span_bytes,
)
from dsagen.runtime.topk import FORM
from dsagen.spec import DeploymentSpec


def _call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()


class TopkPlan:
    """For calls with scores [rows, width] and k slots on one device, on one stream at a time.

    Made by `Kernels.plan_topk`. Holds a workspace whose address never changes, None where blocks share no row. It is
    zeros between calls: the kernels leave it so. `is_dependent` says that calls follow, on their stream, the kernel
    that makes their scores, and begin while it ends. `counted` launches the calls of decode steps whose scores come
    counted; with `counts`, that is of rows that blocks share.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        driver: Driver,
        ordinal: int,
        shape: tuple[int, int, int],
        split: Split | None,
        kernels: Sequence[KernelPlan],
        workspace: torch.Tensor | None = None,
        debug_sync: bool = False,
        is_dependent: bool = False,
        counts: bool = False,
    ) -> None:
        assert split is not None or not counts, "rows that blocks share are counted"
        self.is_dependent = is_dependent
        self._kernels = kernels[-1:] if counts else kernels
        self.spec, self._driver, self._ordinal = spec, driver, ordinal
        self.rows, self.width, self.k = shape
        self.device = driver.torch_device(ordinal)
        self._split, self._lock = split, threading.Lock()
        self._stream: int | None = None
        self._is_lent, self._is_clean = workspace is not None, True
        self.workspace = self._make_workspace(workspace)
        # The launches must not keep the plan alive, which holds device memory.
        spoil = weakref.WeakMethod(self.spoil)
        self.launches = OpLaunches(driver, FORM, debug_sync, failed=lambda: _call_if_alive(spoil))
        self.counted = counted_launches(driver, debug_sync, lambda: _call_if_alive(spoil)) if counts else None
        # See OpLaunches; takes the tensors of a call in the order of TopkTensors, out given, and its scalars.
        self.repeat = self.launches.repeat
        if self.workspace is not None:
            # Until a call has claimed its stream, and after one that ended midway.
            self._hold_stream(None)
            if self._is_lent:
                for launches in self._every_launches():
                    launches.reserve(self.workspace)
            # The first call may come on another stream than the one that sets zeros.
            driver.synchronize(ordinal, driver.current_stream(ordinal))

    @property
    def slugs(self) -> tuple[str, ...]:
        """Names of a call's kernels, in the order of their launches: of rows that begin anywhere.

        Those of a step's plan begin at multiples of 16 bytes, and their scores may come counted.
        """
        return tuple(kernel.slug for kernel in self._kernels)

    @property
    def overlaps(self) -> bool:
        """Whether the first launch of a call begins while the one before it on the stream ends."""
        return self.is_dependent and self._kernels[0].overlaps_previous

    def __repr__(self) -> str:
        parts = 1 if self._split is None else self._split.parts
        return (
            f"TopkPlan(rows={self.rows}, width={self.width}, k={self.k}, kernels={list(self.slugs)}, parts={parts}, "
            f"launches={len(self.slugs)}, workspace_bytes={self.workspace_bytes}, overlaps={self.overlaps}, "
            f"device={str(self.device)!r})"
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the plan needs between launches."""
        return 0 if self._split is None else self._split.workspace_bytes

    def rebind(self) -> None:
        """Let the next launch choose the stream anew; the caller vouches that work on the old one is done."""
        with self._lock:
            if self.workspace is not None:
                self._hold_stream(None)
            self._stream = None

    def require_shape(self, rows: int, width: int, k: int, device: torch.device) -> None:
        """Refuse a call of another shape or device than the plan's."""
        found = {"rows": rows, "width": width, "k": k, "device": device}
        for name, value in found.items():
            if getattr(self, name) != value:
                raise GuardError(
                    f"[T-09] plan: made for {name} {getattr(self, name)}, the call has {name} {value}: make a plan for "
                    "it with plan_topk"
                )

    def require_apart(self, given: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse a call whose tensors lie in the workspace that the caller lent: the kernels write all of it."""
        if self._is_lent and self.workspace is not None:
            tensors = [("workspace", self.workspace), *given]
            require_no_overlap({"workspace"}, tensors, {name: span_bytes(tensor) for name, tensor in tensors})

    def spoil(self) -> None:
        """Say that a call may have ended midway, so that the workspace is not known to be zeros."""
        with self._lock:
            self._is_clean = False
            if self.workspace is not None:
                self._hold_stream(None)

    def claim(self, stream: int) -> None:
        """Bind the plan to a stream, the current one; GuardError when it belongs to another."""
        with self._lock:
            if self._stream is not None and self._stream != stream:
                raise GuardError(
                    f"[T-10] plan: belongs to stream {self._stream:#x}, the current stream is {stream:#x}: make a plan "
                    "for each stream (and for each captured graph), or call plan.rebind() once the other stream's work "
                    "is done"
                )
            if self._stream is None and self.workspace is not None:
                self._driver.keep_for_stream(self._ordinal, self.workspace)
            self._stream = stream
            if not self._is_clean and self.workspace is not None:
                self.workspace.zero_()
                # A capture only records that: until a replay the memory stays as it is.
                self._is_clean = not self._driver.is_capturing(self._ordinal)
            self._hold_stream(stream if self._is_clean else None)

    def arguments(self) -> dict[str, Number]:
        """The arguments that the plan gives."""
        split = self._split
        if split is None or self.workspace is None:
            return {}
        base = self.workspace.data_ptr()
        return {
            "parts": split.parts,
            "part_slots": split.part_slots,
            "list_stride": split.list_stride,
            "histograms": base,
            "counters": base + split.counters_offset_bytes,
            "lists": base + split.lists_offset_bytes,
        }

    def serve(self, routes: OpRoutes, call: tuple[Any, ...]) -> None:
        """Let calls without a plan that are like one of mine come to me; `call` is as the routes take it."""
        routes.add(call, self.launches, self)

    def _hold_stream(self, stream: int | None) -> None:
        for launches in self._every_launches():
            launches.hold_stream(stream)

    def _every_launches(self) -> tuple[OpLaunches, ...]:
        return (self.launches,) if self.counted is None else (self.launches, *self.counted)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A shallow copy would serve a second stream with the same workspace.
        raise DsagenError(
            "a TopkPlan holds device memory and belongs to one stream, so it is neither copied nor pickled: make "
            "another one with plan_topk"
        )

    def _make_workspace(self, lent: torch.Tensor | None) -> torch.Tensor | None:
        size = self.workspace_bytes
        if lent is None:
            return self._new_workspace(size) if size else None
        require_plain("workspace", lent)
        require_device("workspace", lent, self.device, "the plan")
        require_memory("workspace", lent)
        require(TensorRule("workspace", ("uint8",), "[bytes]", (None,)), lent)
        values = {
            "needed_bytes": size,
            "workspace_bytes": lent.numel(),
            "workspace_address": lent.data_ptr() if size else 0,
        }
        check([WORKSPACE_GUARD], values)
        return lent[:size].zero_() if size else None

    def _new_workspace(self, needed_bytes: int) -> torch.Tensor:
        try:
            workspace = self._driver.allocate(self._ordinal, needed_bytes, zero=True)
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU's allocator raises
            advice = "pass fewer rows or shorter ones"
            raise no_memory("workspace", needed_bytes, self.device, advice, error) from None
        # Under a mode of torch (FakeTensorMode, say) it would be memory in name only; the plan may outlive the mode.
        require_plain("workspace", workspace)
        return workspace
