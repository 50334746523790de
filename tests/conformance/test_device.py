"""Every shipped spec that can be built, quick tier, on the device that is there."""

import pytest
import torch

from dsagen.check.run import device_problem, run_check
from dsagen.matrix import expand
from dsagen.spec import load_spec, shipped_specs


def buildable(name):
    return not expand(load_spec(name)).refused


SPECS = [name for name in shipped_specs() if buildable(name)]


def test_there_are_specs_to_check():
    assert len(SPECS) >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_quick_tier(name):
    problem = device_problem(load_spec(name))
    if problem:
        pytest.skip(problem)
    report = run_check(name, "quick", record=False)
    report.require_passed()
    assert report.conformant, report.summary()


@pytest.mark.gpu
def test_the_check_finds_a_wrong_scale_on_the_device(monkeypatch):
    """The device path of the check, from inputs to gates, can fail."""
    from dsagen.check import probes

    if device_problem(load_spec("v32_h16")):
        pytest.skip(device_problem(load_spec("v32_h16")))
    right = probes.reference_of

    def slightly_off(spec, inputs, rows=None):
        want = right(spec, inputs, rows)
        return type(want)(want.out * 1.01, want.lse, want.peak)

    monkeypatch.setattr(probes, "reference_of", slightly_off)
    report = run_check("v32_h16", "quick", only="page.*", record=False)
    assert report.count("failed") == len(report.results)
    torch.cuda.synchronize()
