"""What several of the unit tests share: each way to launch, and sparse decode that lacks an encoding."""

from __future__ import annotations

import sys

import pytest
from fake_driver import FakeDriver
from native_driver import COMPILER, IntsFakeDriver, NativeFakeDriver

from dsagen.dtype import E2M1
from dsagen.families.sparse_decode import rows
from dsagen.kv_format import KvFormat

LAUNCHERS = {"python": None, "c": NativeFakeDriver, "c-ints": IntsFakeDriver}


@pytest.fixture(autouse=True, scope="module")
def no_choice_tables():
    """What was measured on some device decides nothing here: while what a module's tests share is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSAGEN_CHOICE_TABLE", "none")
        yield


@pytest.fixture(autouse=True)
def no_choice_table(monkeypatch):
    """And in a test, unless it says so: knobs are unset before each."""
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", "none")


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


@pytest.fixture
def no_fp4(monkeypatch: pytest.MonkeyPatch) -> str:
    """Sparse decode without its encoding of FP4; returns what it says of the format."""
    built = rows.encoding_of

    def encoding_of(record: KvFormat) -> rows.Encoding | str:
        is_fp4 = record.segment("values").element is E2M1
        return f"KV format {record.format_id}: FP4 is not built" if is_fp4 else built(record)

    monkeypatch.setattr(rows, "encoding_of", encoding_of)
    return "KV format v41_fp4_interleaved: FP4 is not built"
