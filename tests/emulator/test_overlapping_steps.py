"""Steps whose launches overlap: each dependent kernel waits for the one before it ahead of what that one writes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import dsagen
from dsagen.check.indexer_cases import Lengths
from dsagen.check.run import KernelCache
from dsagen.check.step_cases import CHOSEN, StepCase
from dsagen.check.step_run import StepRun
from dsagen.errors import EmulatorError
from dsagen.runtime import api
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions, read_ptx
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile

SPEC = load_spec("v32_decode_h16")
# A row that a block holds, and one that a cluster holds, or that several blocks share in two launches.
HELD = StepCase("overlap.held", 1, 2, 300, 100, lengths=Lengths.WHOLE, num_splits=2)
SHARED = StepCase("overlap.shared", 1, 5, 40_000, 32, lengths=Lengths.EDGES)
CLUSTERED = replace(SHARED, name="overlap.clustered")


@pytest.fixture(autouse=True)
def ways_to_share(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    params = getattr(request.node, "callspec", None)
    if params is not None and params.params.get("case") is SHARED:
        monkeypatch.setenv("DSAGEN_TOPK_CLUSTER", "1")


# V4.1's layers: one chooses blocks, one selects inside of them.
LEVELS = load_spec("v41_decode_h16")
CHOSEN_BLOCKS = StepCase("overlap.chosen", 1, 2, 300, lengths=Lengths.WHOLE, layers=CHOSEN, candidate_blocks=12)


@pytest.fixture(autouse=True)
def attention_with_dependent_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other body begins early by itself."""
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "mma_sync")


def run(case: StepCase, launches: list[EmulatedLaunch] | None = None) -> StepRun:
    spec = LEVELS if case is CHOSEN_BLOCKS else SPEC
    observe = None if launches is None else launches.append

    def load(spec: Any, device: torch.device) -> Any:
        return dsagen.load(spec, device="emulator", emulator=EmulatorOptions(seed=1, threads=1, observe=observe))

    found = StepRun(case, KernelCache(spec, torch.device("cpu"), load), torch.device("cpu"), 7)
    found.run()
    return found


def spoil(monkeypatch: pytest.MonkeyPatch, symbol: str) -> None:
    """Take the wait out of the dependent kernels with that in their names."""

    def read(plans: Any) -> Any:
        codes = read_ptx(plans)
        dependent = {plan.slug for plan in plans if plan.overlaps_previous and symbol in plan.symbol}
        spoilt = {slug: re.subn(r"griddepcontrol\.wait;", "", codes[slug].ptx) for slug in dependent}
        assert all(count == 1 for _, count in spoilt.values())
        return {**codes, **{slug: replace(codes[slug], ptx=text) for slug, (text, _) in spoilt.items()}}

    monkeypatch.setattr(api, "read_ptx", read)


@pytest.mark.parametrize("case", [HELD, CLUSTERED, SHARED], ids=lambda case: case.name)
def test_a_step_launches_the_forms_that_wait(case: StepCase) -> None:
    launches: list[EmulatedLaunch] = []
    found = run(case, launches)
    dependent = [launch.symbol.endswith("launch_dependent") for launch in launches]
    # Scores, their selection by one kernel or two, attention and its combine.
    assert dependent[:3] == ([False, True, False] if case is SHARED else [False, True, True])
    assert ("row_cluster" in launches[1].symbol) == (case is CLUSTERED)
    assert {launch.symbol for launch in launches} == {"dsa_" + re.sub(r"[-.]", "_", slug) for slug in found.launched}


def test_layers_of_both_levels_launch_the_forms_that_wait() -> None:
    launches: list[EmulatedLaunch] = []
    found = run(CHOSEN_BLOCKS, launches)
    names = [launch.symbol.removeprefix("dsa_").removesuffix("_launch_dependent") for launch in launches]
    waits = [launch.symbol.endswith("launch_dependent") for launch in launches]
    kinds = [re.match(r"(indexer_logits|topk|sparse_decode)_[a-z]+", name)[0] for name in names]  # type: ignore[index]
    assert list(zip(kinds, waits, strict=True)) == [
        ("indexer_logits_blocks", False),
        ("topk_main", False),
        ("topk_main", True),
        ("sparse_decode_main", True),
        ("indexer_logits_candidates", False),
        ("topk_main", True),
        ("sparse_decode_main", True),
    ]
    assert {launch.symbol for launch in launches} == {"dsa_" + re.sub(r"[-.]", "_", slug) for slug in found.launched}


@pytest.mark.parametrize(
    ("case", "symbol", "buffer"),
    [
        (HELD, "topk_main", "scores"),
        (CLUSTERED, "topk_main", "scores"),
        (SHARED, "topk_count", "scores"),
        (HELD, "sparse_decode_main", "(indices|topk_length)"),
        (CHOSEN_BLOCKS, "topk_main", "scores"),
    ],
    ids=["topk", "clusters", "shared_rows", "attention", "blocks"],
)
def test_a_kernel_that_does_not_wait_is_stopped(
    case: StepCase, symbol: str, buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, symbol)
    early = rf"buffer {buffer}, which the grid before writes, ahead of griddepcontrol\.wait"
    with pytest.raises(EmulatorError, match=early):
        run(case)


def test_attention_on_hopper_waits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body has no dependent form: it always begins early."""
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    launches: list[EmulatedLaunch] = []
    run(HELD, launches)
    assert ["hopper" in launch.symbol and "dependent" not in launch.symbol for launch in launches][2]
    spoil(monkeypatch, "sparse_decode_main_hopper")
    early = r"buffer (indices|topk_length), which the grid before writes, ahead of griddepcontrol\.wait"
    with pytest.raises(EmulatorError, match=early):
        run(HELD)
