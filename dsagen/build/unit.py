"""What the build asks of a rendered kernel; `dsagen.render.RenderedUnit` fits, as any record with these fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Unit(Protocol):
    """One kernel as complete CUDA text, with the variant and the plan that it was rendered from.

    `slug` names it (file name and store prefix), `symbol` is its one extern "C" entry, `arch` is like "sm_90a".
    `variant` and `plan` hold JSON values only. `plan["allow_spill_bytes"]`, 0 where absent, is the stack frame and the
    spill stores and loads, in bytes per thread, that the build accepts. A kernel may not take more registers than
    `plan["registers_cap"]`, nor fewer where `plan["moves_registers"]` is true.
    """

    @property
    def slug(self) -> str: ...  # noqa: D102
    @property
    def symbol(self) -> str: ...  # noqa: D102
    @property
    def arch(self) -> str: ...  # noqa: D102
    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def variant(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def plan(self) -> Mapping[str, Any]: ...  # noqa: D102
