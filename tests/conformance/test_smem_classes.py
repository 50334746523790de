"""Kernels planned for the shared memory of other parts, compiled for and run on the device at hand."""

from __future__ import annotations

import pytest

from dsagen.arch import ARCHS, Arch
from dsagen.check.run import run_check
from dsagen.families.sparse_decode import geometry
from dsagen.families.sparse_decode.geometry import Geometry
from dsagen.families.sparse_decode.rows import Caches

# Of each class the arch with the fewest features: copies of 16 bytes, an even deal of registers.
CLASSES = {"99 KB": "sm_86", "163 KB": "sm_80"}
SPECS = ("v32_h16", "v4_h16", "v41_h16", "v41_page_split_h64", "v41_fp4_h16", "contest_attention_h16", "glm5_nope_h16")


def plan_as(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan every main kernel as for another arch."""
    plain = geometry.fitting_geometry

    def fitting(caches: Caches, heads_n: int, _: Arch) -> Geometry | None:
        return plain(caches, heads_n, ARCHS[arch])

    monkeypatch.setattr(geometry, "fitting_geometry", fitting)


@pytest.mark.gpu
@pytest.mark.parametrize("smem_class", CLASSES)
@pytest.mark.parametrize("spec", SPECS)
def test_every_class_of_shared_memory_runs(spec: str, smem_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_as(CLASSES[smem_class], monkeypatch)
    report = run_check(spec, only="[vepi]*", record=False)  # values, extra, peer, page, ids
    report.require_passed()
    assert report.conformant


@pytest.mark.compile
@pytest.mark.parametrize("smem_class", CLASSES)
def test_a_kernel_of_another_class_is_that(smem_class: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on the emulator, for one case: what the device runs is what was meant."""
    plan_as(CLASSES[smem_class], monkeypatch)
    report = run_check("v4_h16", only="values.mixed_scales", device="emulator", record=False, seed=3)
    report.require_passed()
    assert report.conformant
