"""The machine is compiled once per content of its sources, not once per test run; micro-kernels share a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Files of kernels of a few instructions, held to numpy; and the one that looks at what they have launched.
MICRO = frozenset(f"test_{name}" for name in (
    "arithmetic", "codes", "conversions", "integer_forms", "matrix_forms", "memory_forms", "emulated_machine", "races",
    "remaining_forms", "rounding", "wgmma_forms", "bulk_copies", "clusters", "tensor_copies",
))  # fmt: skip
LAST = "test_every_form"
_PASSED: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in MICRO or item.path.stem == LAST:
            item.add_marker(pytest.mark.xdist_group("micro-kernels"))
    items.sort(key=lambda item: item.path.stem == LAST)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.add(report.nodeid)


@pytest.fixture
def micro_tests_that_did_not_pass(request: pytest.FixtureRequest) -> list[str]:
    """Tests in the files of MICRO that have not passed in this process; the files, where not all are selected."""
    items = [item for item in request.session.items if item.path.stem in MICRO]
    config = request.config.option
    if {item.path.stem for item in items} != MICRO or config.keyword or config.markexpr:
        return sorted(MICRO)
    names = [item.nodeid.split("@")[0] for item in items]
    passed = {name.split("@")[0] for name in _PASSED}
    return [name for name in names if name not in passed]


@pytest.fixture(autouse=True)
def kernels_of_the_run(common_store: None) -> None:
    """A kernel is compiled once, whichever test needs it first."""


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Tensors here are small, and tests run side by side: threads that wait for each other take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def machine(shared_machine: None) -> None:
    """Every test here runs the machine."""
