"""The script that a device runs of repeated calls, on the launcher in C over a driver that records launches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from repeating import answers_of, require_repeated

from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from fake_driver import FakeDriver, fake_cubins
from native_driver import COMPILER, IntsFakeDriver, NativeFakeDriver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def answers(driver: FakeDriver):
    kernels = Kernels(load_spec("v32_h16"), open_driver=lambda: driver, read=fake_cubins)
    ids = torch.zeros(4, 1, 2048, dtype=torch.int32)
    return answers_of(
        kernels, torch.zeros(4, 1, 16, 576).bfloat16(), torch.zeros(8, 64, 1, 656, dtype=torch.uint8), ids
    )


def test_known_calls_are_repeated():
    driver = NativeFakeDriver()
    require_repeated(answers(driver))
    # Four calls of two kernels, of which two had the same outputs.
    assert len(driver.launches) == 8 and len({record.block for record in driver.launches}) == 6


@pytest.mark.parametrize("driver_type", [FakeDriver, IntsFakeDriver])
def test_where_python_reads_the_tensors_nothing_is_repeated(driver_type):
    found = answers(driver_type())
    assert found[:4] == (False,) * 4
    with pytest.raises(AssertionError):
        require_repeated(found)
