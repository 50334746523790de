"""Each way to launch, for tests of what is launched."""

import sys

import pytest
from fake_driver import FakeDriver
from native_driver import COMPILER, IntsFakeDriver, NativeFakeDriver

LAUNCHERS = {"python": None, "c": NativeFakeDriver, "c-ints": IntsFakeDriver}


@pytest.fixture(params=LAUNCHERS)
def each_launcher(request, monkeypatch):
    """Runs a test with launches by cuda-python, by the launcher in C, and by the latter without reading tensors."""
    driver = LAUNCHERS[request.param]
    if driver is not None:
        if COMPILER is None:
            pytest.skip("needs a C compiler")
        # Test modules borrow from each other what makes a driver.
        for name, module in list(sys.modules.items()):
            if name.startswith("test_") and getattr(module, "FakeDriver", None) is FakeDriver:
                monkeypatch.setattr(module, "FakeDriver", driver)
