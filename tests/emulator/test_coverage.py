"""Every kernel that a shipped spec builds consists of instructions that the emulator has.

All kernels for one arch of each class of matrix instructions, and a part of them, not the same, for each other arch,
which has the same PTX but for the arch's name; `--all-mutants` takes all for all.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from ptx_texts import ptx_of

from dsagen.arch import ARCHS
from dsagen.emulator import coverage
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.spec import load_spec
from dsagen.spec_source import shipped_specs

pytestmark = pytest.mark.compile


def plans_of(arch: str) -> dict[str, KernelPlan]:
    """All kernels of the shipped specs for an arch, by slug."""
    specs = [load_spec(name).replace(archs=[arch]) for name in shipped_specs()]
    return {plan.slug: plan for spec in specs for plan in expand(spec).plans()}


# The first arch of each class of matrix instructions.
FIRST = {row.mma_class: name for name, row in reversed(ARCHS.items())}.values()


# Of the kernels, one in so many for archs that are not the first.
PART = 6


@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_kernel(arch: str, request: pytest.FixtureRequest) -> None:
    plans = plans_of(arch)
    assert len(plans) > 4
    if arch not in FIRST and not request.config.getoption("--all-mutants"):
        plans = {slug: plans[slug] for slug in sorted(plans)[list(ARCHS).index(arch) % PART :: PART]}
    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(plans, pool.map(lambda plan: coverage(ptx_of(plan, build=False)), plans.values()), strict=True)
        )
    assert {slug: missing for slug, missing in found.items() if missing} == {}
