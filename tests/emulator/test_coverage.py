"""Every kernel that a shipped spec builds, for every arch, consists of instructions that the emulator has."""

from __future__ import annotations

import pytest

from dsagen.arch import ARCHS
from dsagen.build import Store, build_units, find_toolchain
from dsagen.emulator import coverage
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import load_spec
from dsagen.spec_source import shipped_specs

pytestmark = pytest.mark.compile


def plans(arch: str) -> list[KernelPlan]:
    found = {
        plan.slug: plan for name in shipped_specs() for plan in expand(load_spec(name).replace(archs=[arch])).plans()
    }
    return list(found.values())


@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_kernel(arch: str) -> None:
    # The compile tier builds the same ones, so that most come from the store.
    units = [render(plan) for plan in plans(arch)]
    results = build_units(units, Store.open(), lambda: find_toolchain({arch: ARCHS[arch].min_cuda}))
    assert len(results) > 4
    missing = {result.entry.name: coverage(result.entry.ptx_path.read_text()) for result in results}
    assert {name: found for name, found in missing.items() if found} == {}
