"""The object that a caller of flash_mla makes once a step and passes to every layer's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dsagen.errors import GuardError


class CallShape(NamedTuple):
    """What calls with one metadata object have in common."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int | None
    extra_page_block_size: int | None
    extra_topk: int | None
    enable_batch_invariant: bool = False


class KnownCall(NamedTuple):
    """A call that has been checked: by what one like it is told, and what repeats it with its softmax scale.

    `version` is that of the deployments whose kernels it is.
    """

    like: tuple[object, ...]
    version: int
    repeat: Callable[..., Any]
    softmax_scale: float


class FlashMLASchedMeta:
    """Filled by its first call, which fixes the shape of the later ones. It holds no schedule: plans do.

    `tile_scheduler_metadata` and `num_splits` exist for callers that look at them, and stay None. `known` is the last
    call that was checked: those of a step's other layers are like it.
    """

    Config = CallShape

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: CallShape | None = None
        self.tile_scheduler_metadata: None = None
        self.num_splits: None = None
        self.known: KnownCall | None = None

    def fill(self, shape: CallShape) -> None:
        """Take the shape of a call that has been made."""
        self.config, self.have_initialized = shape, True

    def require(self, shape: CallShape, function: str) -> None:
        """GuardError for a call of another shape than the first one's."""
        if self.config is None or self.config == shape:
            return
        for name, had, has in zip(CallShape._fields, self.config, shape, strict=True):
            if had != has:
                raise GuardError(
                    f"[T-20] {function}: tile_scheduler_metadata: made for {name} {had}, this call has {has}: "
                    "get another with get_mla_metadata() for calls of another shape"
                )
