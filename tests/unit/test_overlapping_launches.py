"""Kernels that start before their predecessor ends are planned only where the arch has such launches."""

from __future__ import annotations

import pytest

from dsagen.arch import ARCHS
from dsagen.matrix import expand
from dsagen.spec import load_spec, shipped_specs


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_no_kernel_overlaps_its_predecessor_where_the_arch_cannot(arch):
    plans = [plan for name in shipped_specs() for plan in expand(load_spec(name).replace(archs=[arch.name])).plans()]
    assert plans
    assert {plan.overlaps_previous for plan in plans} == ({True, False} if arch.has_pdl else {False})
