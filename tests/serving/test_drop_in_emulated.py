"""The drop-in modules on the emulator: cases of flash_mla's own tests, against the fp64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from drop_in import DropIn

import dsagen
from dsagen.check.cases import ExtraCase, Lengths, corner_cases, peer_cases
from dsagen.check.probes import CaseRun
from dsagen.check.run import run_case
from dsagen.compat import flash_mla, flash_mla_legacy
from dsagen.compat.decode import DEPLOYMENTS
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile

# The first of each list with a width that the emulator does in seconds.
PEER = next(case for case in peer_cases() if (case.topk, case.page_size, case.s_q) == (64, 69, 3))
CORNER = next(case for case in corner_cases() if case.empty_requests and case.sink and case.batch == 4)
CASES = {case.name: case for case in (replace(PEER, batch=2), replace(CORNER, batch=3))}


@pytest.fixture(autouse=True)
def kernels(shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    for name in ("v32_h64", "v41_h64", "v41_page_split_h64"):
        flash_mla.use(dsagen.load(name, device="emulator", emulator=EmulatorOptions(races=False)))
    yield
    DEPLOYMENTS.forget()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", [flash_mla, flash_mla_legacy], ids=lambda module: module.__name__)
@pytest.mark.parametrize("kv_format", [None, "V32"])
def test_peers_cases(name: str, module: ModuleType, kv_format: str | None) -> None:
    options = {} if kv_format is None else {"kv_format": kv_format}
    drop_in = DropIn(module, load_spec("v32_h64"), **options)
    result, _ = run_case(CaseRun(CASES[name], lambda _: drop_in, torch.device("cpu"), seed=5))
    assert result.status == "passed", result.problem


@pytest.mark.parametrize(
    ("module", "spec"), [(flash_mla, "v41_h64"), (flash_mla_legacy, "v41_page_split_h64")], ids=["newer", "older"]
)
def test_two_caches_lie_as_the_generation_has_them(module: ModuleType, spec: str) -> None:
    case = replace(PEER, batch=2, extra=ExtraCase(300, 70, 5, lengths=Lengths.PER_REQUEST))
    drop_in = DropIn(module, load_spec(spec))
    result, _ = run_case(CaseRun(case, lambda _: drop_in, torch.device("cpu"), seed=5))
    assert result.status == "passed", result.problem
