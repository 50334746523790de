"""The family object: cells of the matrix and kernel plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsagen.arch import Arch
from dsagen.arch import arch as arch_row
from dsagen.families.topk.geometry import (
    SCORE_CPP,
    Geometry,
    preferred_candidates,
    preferred_geometry,
    smem_fields,
)
from dsagen.families.topk.guards import LAUNCH_GUARDS, PLAN_GUARDS
from dsagen.families.topk.params import PARAMS
from dsagen.family import Cell
from dsagen.guard import Guard, check
from dsagen.plan import KernelPlan, TypeAlias, Variant, checked, lay_out_params

if TYPE_CHECKING:
    from dsagen.spec import DeploymentSpec

NAME = "topk"
BODY = "row_select"
# Two rows of a block of 1024 threads never share an SM: one has all of its registers.
MOST_REGISTERS = 64

# A plan guard's names in the generated unit; names that are not here are printed as numbers.
_C_NAMES = {
    "smem_bytes": "static_cast<int>(sizeof(SharedStorage))",
    "threads": "Body::kThreads",
    "digit_bits": "Body::kDigitBits",
    "key_bits": "Body::kKeyBits",
    "vector_elements": "Body::Vector::kElements",
}


class TopK:
    """Exact top-k, portable body: one block a row."""

    name = NAME
    ops: tuple[str, ...] = ("topk",)
    guards: tuple[Guard, ...] = PLAN_GUARDS + LAUNCH_GUARDS

    def expand(self, spec: DeploymentSpec, arch: Arch) -> tuple[Cell, ...]:
        """The one kernel that selects from scores of the spec's dtype."""
        assert spec.scores is not None, "a spec with the op has a dtype of scores"
        axes: tuple[tuple[str, str | int], ...] = (
            ("score", spec.scores),  # bytes of a load, bits of a key and so the number of sweeps
            ("cand", preferred_candidates(spec.scores)),  # shared memory
        )
        return (Cell(NAME, "main", arch.name, Variant(NAME, "main", BODY, arch.name, axes)),)

    def plan(self, variant: Variant) -> KernelPlan:
        """The plan of a variant; GuardError names the limit that it breaks."""
        return plan_select(variant)


FAMILY = TopK()


def plan_select(variant: Variant, geometry: Geometry | None = None) -> KernelPlan:
    """The kernel's plan; `geometry` overrides the preferred one (for tests and for measuring others)."""
    arch, score = arch_row(variant.arch), str(variant.axis("score"))
    g = geometry or preferred_geometry(score, variant.axis_int("cand"))
    fields, smem_bytes = smem_fields(g)
    params, params_bytes = lay_out_params(PARAMS)
    values = {
        "smem_bytes": smem_bytes,
        "smem_optin_bytes": arch.smem_optin_bytes,
        "threads": g.threads,
        "registers_cap": MOST_REGISTERS,
        "registers_per_sm": arch.registers_per_sm,
        "digit_bits": g.digit_bits,
        "key_bits": g.key_bits,
        "vector_elements": g.vector_elements,
    }
    check(PLAN_GUARDS, values, variant.slug)
    return KernelPlan(
        variant=variant,
        constants=(
            ("kThreads", g.threads),
            ("kDigitBits", g.digit_bits),
            ("kCandidates", g.candidates),
            ("kInFlight", g.in_flight),
        ),
        types=(
            TypeAlias("Score", SCORE_CPP[score], "topk/score.cuh"),
            TypeAlias("Body", "topk::RowSelect<Constants, SharedStorage, Score, Params>", "topk/row_select.cuh"),
        ),
        threads=g.threads,
        min_blocks_per_sm=1,
        registers_cap=MOST_REGISTERS,
        smem=fields,
        smem_bytes=smem_bytes,
        params=params,
        params_bytes=params_bytes,
        grid="rows",
        overlaps_previous=False,
        guards=checked(PLAN_GUARDS, values, _C_NAMES),
        budget=_budget(g, smem_bytes, arch),
    )


def _budget(g: Geometry, smem_bytes: int, arch: Arch) -> tuple[tuple[str, str], ...]:
    kept = f", or {g.levels + 1} where more than {g.candidates} keys share the first digit" if g.levels > 2 else ""
    return (
        ("shape", f"a row by {g.threads} threads, {g.levels} digits of up to {g.digit_bits} bits"),
        ("shared memory", f"{smem_bytes} of {arch.smem_optin_bytes} B"),
        ("registers", f"{MOST_REGISTERS} a thread"),
        ("row sweeps", f"at most {min(g.levels, 2) + 1}{kept}"),
    )
