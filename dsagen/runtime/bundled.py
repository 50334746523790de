"""Kernels out of a bundle: no store, no toolkit, and nothing but what this dsagen would have compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dsagen import knobs
from dsagen.build.bundle import Bundle, BundledKernel
from dsagen.build.key import canonical_json
from dsagen.errors import StoreError
from dsagen.matrix import Matrix
from dsagen.plan import KernelPlan
from dsagen.render import instruction_hash, render
from dsagen.slug import parse_slug

# What asks for a body, whatever spec and tables would choose.
_BODY_KNOBS: Mapping[str, knobs.Knob[str | None]] = {
    "sparse_decode": knobs.SPARSE_DECODE_BODY,
    "indexer_logits": knobs.INDEXER_LOGITS_BODY,
}


@dataclass(frozen=True)
class BundledCode:
    """Reads cubins from one bundle.

    A kernel counts when its plan is the plan made here, which launches depend on, and its text the same up to comments:
    StoreError for any other. The compiler's flags and version are those it was packed with.
    """

    bundle: Bundle
    kernels: Mapping[str, BundledKernel]

    @classmethod
    def of(cls, bundle: Bundle, names: Sequence[str]) -> BundledCode:
        """The code of one spec's kernels, by slug."""
        return cls(bundle, {bundle.kernels[name].stamp.slug: bundle.kernels[name] for name in names})

    def without_absent(self, matrix: Matrix) -> Matrix:
        """The matrix without kernels that are not in the bundle, where another of the same role is.

        A choice table of this machine may name a kernel that none named where the bundle was packed.
        """
        packed = {
            (cell.op, cell.arch, cell.role)
            for cell in matrix.cells
            if cell.variant and cell.variant.slug in self.kernels
        }
        kept = [
            cell
            for cell in matrix.cells
            if (cell.op, cell.arch, cell.role) not in packed or (cell.variant and cell.variant.slug in self.kernels)
        ]
        return Matrix(matrix.spec_name, tuple(kept))

    def __call__(self, plans: Sequence[KernelPlan]) -> Mapping[str, Any]:
        """Cubin by slug."""
        return {plan.slug: self._cubin(plan) for plan in plans}

    def _cubin(self, plan: KernelPlan) -> bytes:
        found = self.kernels.get(plan.slug)
        if found is None:
            self._refuse(plan, f"is not in it{self._other_body(plan)}")
        unit = render(plan)
        if canonical_json(found.plan) != canonical_json(unit.plan):
            self._refuse(plan, "has another plan in it")
        if instruction_hash(found.source) != unit.evidence_hash:
            self._refuse(plan, "has another text in it")
        return found.cubin

    def _other_body(self, plan: KernelPlan) -> str:
        """Which body of the same kernel was packed, and what asks for it; empty where none was."""
        knob, variant = _BODY_KNOBS.get(plan.variant.family), plan.variant
        for slug in self.kernels:
            found = parse_slug(slug)
            same = (found.family, found.kernel, found.arch) == (variant.family, variant.kernel, variant.arch)
            if knob is not None and same and found.body != variant.body:
                return f", {slug} is, which {knob.name}={found.body} asks for"
        return ""

    def _refuse(self, plan: KernelPlan, what: str) -> NoReturn:
        raise StoreError(
            f"{self.bundle.path}: {plan.slug} {what}: it was packed by dsagen {self.bundle.made_by}: pack it again "
            "with this one (`dsagen bundle`), or load the spec itself"
        )
