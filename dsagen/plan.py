"""Variants and kernel plans: what exists at compile time, and every number derived from it, each with one owner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dsagen.guard import Guard
from dsagen.slug import make_slug, slug_symbol

# Size in bytes of each C type that parameters and shared memory use; the alignment is the same.
C_TYPE_BYTES: Mapping[str, int] = {
    "u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "float": 4, "u64": 8, "i64": 8, "pointer": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One kernel that is to exist: every compile-time choice, and nothing else."""

    family: str
    kernel: str
    body: str
    arch: str
    axes: tuple[tuple[str, str | int], ...]

    @cached_property
    def slug(self) -> str:
        """File name, store prefix and (as `dsa_...`) symbol."""
        return make_slug(self.family, self.kernel, self.body, self.arch, self.axes)

    @property
    def symbol(self) -> str:
        """Name of the kernel's extern "C" entry."""
        return slug_symbol(self.slug)

    def axis(self, name: str) -> str | int:
        """Value of an axis; KeyError for one that the variant does not have."""
        return dict(self.axes)[name]

    def axis_int(self, name: str) -> int:
        """Value of an integer axis."""
        return int(self.axis(name))


@dataclass(frozen=True)
class SmemField:
    """One member of the shared-memory struct. `extents` are array dimensions, outermost first."""

    name: str
    ctype: str
    extents: tuple[int, ...]
    note: str
    align_bytes: int = 16
    offset_bytes: int = -1

    @property
    def size_bytes(self) -> int:
        """Bytes that the member takes."""
        return C_TYPE_BYTES[self.ctype] * math.prod(self.extents)

    @property
    def last_byte(self) -> int:
        """Offset of its last byte."""
        return self.offset_bytes + self.size_bytes - 1

    @property
    def declaration(self) -> str:
        """The member in C++."""
        return f"alignas({self.align_bytes}) {self.ctype} {self.name}" + "".join(f"[{n}]" for n in self.extents)


@dataclass(frozen=True)
class ParamField:
    """One member of the kernel's parameter struct. For pointers `target` is what they point to, such as `const i32`.

    `kept`: the kernel reads there what was left by launches before; what it may write is otherwise written first.
    """

    name: str
    ctype: str
    note: str
    target: str = ""
    offset_bytes: int = -1
    kept: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that the member takes, which is its alignment as well."""
        return C_TYPE_BYTES[self.ctype]

    @property
    def declaration(self) -> str:
        """The member in C++."""
        if self.ctype == "pointer":
            return f"{self.target}* {self.name}"
        return f"{'float' if self.ctype == 'f32' else self.ctype} {self.name}"


@dataclass(frozen=True)
class TypeAlias:
    """A C++ type that the unit names: `using name = cpp`, defined in `header`."""

    name: str
    cpp: str
    header: str


@dataclass(frozen=True)
class CheckedGuard:
    """A plan guard with the values it was checked with and the C++ that the unit asserts."""

    guard_id: str
    expression: str
    c_expression: str
    values: tuple[tuple[str, int], ...]
    message: str


@dataclass(frozen=True)
class KernelPlan:
    """Everything that rendering, building, loading and launching one variant need to agree on.

    `constants` become one C++ struct; `params` is the argument block, packed as given. The
    launch is `grid` CTAs (an expression over run-time names, for people; the family's op computes it) of `threads`
    threads with `smem_bytes` of dynamic shared memory. `overlaps_previous` marks a kernel that waits for its
    predecessor inside (programmatic dependent launch where the arch has it). `moves_registers` marks one whose warps
    hand registers to each other: it is reckoned from exactly `registers_cap` a thread. `parts` says of each part that
    its headers may have whether the unit has it.
    """

    variant: Variant
    constants: tuple[tuple[str, int | float], ...]
    types: tuple[TypeAlias, ...]
    threads: int
    min_blocks_per_sm: int
    registers_cap: int
    smem: tuple[SmemField, ...]
    smem_bytes: int
    params: tuple[ParamField, ...]
    params_bytes: int
    grid: str
    overlaps_previous: bool
    guards: tuple[CheckedGuard, ...]
    budget: tuple[tuple[str, str], ...] = ()
    moves_registers: bool = False
    parts: tuple[tuple[str, bool], ...] = ()

    @property
    def slug(self) -> str:
        """The variant's slug."""
        return self.variant.slug

    @property
    def symbol(self) -> str:
        """The variant's symbol."""
        return self.variant.symbol

    @property
    def smem_align_bytes(self) -> int:
        """Where shared memory begins: at a multiple of this."""
        return max([128, *(field.align_bytes for field in self.smem)])

    def constant(self, name: str) -> int:
        """An integer constant by its C++ name."""
        return int(dict(self.constants)[name])

    def to_json(self) -> dict[str, Any]:
        """Plain data for the store, `explain` and the key."""
        return asdict(self)


def lay_out_smem(fields: Iterable[SmemField]) -> tuple[tuple[SmemField, ...], int]:
    """Assign offsets in order, as C++ would; also returns sizeof the struct."""
    placed: list[SmemField] = []
    offset, largest = 0, 1
    for field in fields:
        offset = round_up(offset, field.align_bytes)
        placed.append(replace(field, offset_bytes=offset))
        offset += field.size_bytes
        largest = max(largest, field.align_bytes)
    return tuple(placed), round_up(offset, largest)


def lay_out_params(fields: Iterable[ParamField]) -> tuple[tuple[ParamField, ...], int]:
    """Assign naturally aligned offsets in order; also returns sizeof the struct."""
    placed: list[ParamField] = []
    offset, largest = 0, 1
    for field in fields:
        offset = round_up(offset, field.size_bytes)
        placed.append(replace(field, offset_bytes=offset))
        offset += field.size_bytes
        largest = max(largest, field.size_bytes)
    return tuple(placed), round_up(offset, largest)


def checked(guards: Iterable[Guard], values: Mapping[str, int], c_names: Mapping[str, str]) -> tuple[CheckedGuard, ...]:
    """Records of guards that were found to hold, for the plan."""
    return tuple(
        CheckedGuard(
            guard_id=guard.guard_id,
            expression=guard.expression,
            c_expression=guard.to_c({name: c_names.get(name, str(values[name])) for name in guard.names}),
            values=tuple((name, int(values[name])) for name in guard.names),
            message=guard.message.format(**values),
        )
        for guard in guards
    )


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below value."""
    return -(-value // multiple) * multiple
