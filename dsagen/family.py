"""What a kernel family provides, and how families are found: one folder each under dsagen/families, no list to edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from dsagen.arch import Arch
from dsagen.errors import DsagenError
from dsagen.guard import Guard
from dsagen.plan import KernelPlan, Variant

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec


@dataclass(frozen=True)
class Cell:
    """One cell of the instantiation matrix: a variant that will be built, or what was refused and why.

    `op` is the spec op it serves, `role` its kernel's place in that op's launches. `refusal` is empty for a kept cell,
    `why` says what decided on the variant's body, if spec, arch and knobs did.
    """

    op: str
    role: str
    arch: str
    variant: Variant | None
    refusal: str = ""
    why: str = ""

    @property
    def kept(self) -> bool:
        """Whether the cell is built."""
        return self.variant is not None and not self.refusal


class Family(Protocol):
    """A kernel family: pure arithmetic, no torch, no toolkit."""

    @property
    def name(self) -> str:
        """Folder name under dsagen/families and templates."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Spec ops that it serves."""

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Every guard of the family, of all stages."""

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """Cells that the spec needs on one arch, refused ones included."""

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""


@cache
def families() -> Mapping[str, Family]:
    """All families by name, found by folder."""
    package = importlib.import_module("dsagen.families")
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            family: Family = importlib.import_module(f"dsagen.families.{module.name}").FAMILY
            found[family.name] = family
    return found


def family_of_op(op: str) -> Family:
    """The family that serves a spec op; DsagenError when none is installed."""
    for family in families().values():
        if op in family.ops:
            return family
    known = ", ".join(sorted(o for f in families().values() for o in f.ops))
    raise DsagenError(f"no kernel family serves op {op!r}: built are {known}")
