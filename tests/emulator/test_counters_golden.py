"""What the shipped kernels do for one small call each, held as text: a slower kernel shows as a larger number.

A kernel that is new or changed needs nothing but `pytest tests/emulator/test_counters_golden.py --update-golden`: the
text is made of the kernels that the shipped specs reach.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsagen import knobs
from dsagen.arch import arch
from dsagen.build import find_toolchain
from dsagen.check.block_cases import BlockCase
from dsagen.check.candidate_cases import CandidateCase
from dsagen.check.cases import DecodeCase, ExtraCase
from dsagen.check.index_cases import Action as IndexAction
from dsagen.check.index_cases import IndexCacheCase
from dsagen.check.indexer_cases import Lengths, LogitsCase
from dsagen.check.kv_cases import Action, KvCase
from dsagen.check.place import Case
from dsagen.check.ragged_cases import RaggedCase
from dsagen.check.ragged_cases import Windows as RaggedWindows
from dsagen.check.recording import launching_op
from dsagen.check.run import RUNS, run_case
from dsagen.check.step_cases import StepCase
from dsagen.check.topk_cases import Ids, Scores, TopkCase, Windows
from dsagen.dependent import has_chain
from dsagen.emulator import DEVICE
from dsagen.emulator.counters import Counters
from dsagen.families.kv_cache.op import converts
from dsagen.families.sparse_decode import family as sparse_decode
from dsagen.matrix import Matrix, expand
from dsagen.runtime.api import load
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.spec import DeploymentSpec, load_spec, shipped_specs

pytestmark = pytest.mark.compile

GOLDEN = Path(__file__).with_name("counters.txt")
UPDATE = (
    "run `pytest tests/emulator/test_counters_golden.py --update-golden`, and read the difference before you commit"
)
# Another nvcc gives other instructions. The pin is pyproject.toml's.
NVCC = "13.0"
# Cases whose rows are in no cluster, though they fit one.
SHARED, COUNTED = "golden.shared", "golden.counted"
# Calls that reach every kernel between them. Two splits, so that there is a combine; rows that a tile does not divide.
# Of top-k: rows off 16 B with a window inside, short ones, more rows than SMs, few rows that a cluster holds, or that
# blocks share, more and longer ones than are kept.
CASES: tuple[Case, ...] = (
    DecodeCase("golden", batch=2, s_q=1, kv_tokens=300, topk=200, page_size=64, num_splits=2),
    TopkCase("golden", 2, 9001, 512, Scores.NORMAL, Windows.BOTH, Ids.PAGED, 61, misaligned=1),
    TopkCase("golden.short", 2, 300, 64),
    TopkCase("golden.rows", 133, 300, 64),
    TopkCase("golden.clustered", 1, 70_000, 512),
    TopkCase(SHARED, 1, 70_000, 512),
    TopkCase("golden.many", 133, 17_001, 64),
    TopkCase("golden.long", 70, 70_000, 64),
    LogitsCase("golden", 2, 2, 1000, 64, lengths=Lengths.WHOLE),
    BlockCase("golden", LogitsCase("", 2, 2, 1000, 64, lengths=Lengths.WHOLE)),
    *(IndexCacheCase(f"golden.{action}", action) for action in IndexAction),
    RaggedCase("golden", 21, 1000, windows=RaggedWindows.PROMPTS),
    CandidateCase("golden", LogitsCase("", 2, 2, 1000, 64), 120),
    # Steps whose rows a block holds, and some that a cluster holds or blocks share, of a few keys; of one token scores
    # may be counted.
    StepCase("golden", 2, 2, 1000, 200, lengths=Lengths.WHOLE, num_splits=2),
    StepCase("golden.clustered", 1, 5, 40_000, 32, lengths=Lengths.EDGES),
    StepCase(SHARED, 1, 5, 40_000, 32, lengths=Lengths.EDGES),
    StepCase(COUNTED, 4, 1, 40_000, 32, lengths=Lengths.EDGES),
    *(KvCase(f"golden.{action}.{extra}", action, extra) for action in Action for extra in (False, True)),
)


def measure(name: str, case: Case, seed: int = 0) -> dict[str, Counters]:
    """Counters of each kernel, by symbol, that a case runs for a shipped spec."""
    launches: list[EmulatedLaunch] = []
    # CTAs that meet in atomics of global memory do so in one order on one thread.
    options = EmulatorOptions(seed=seed, races=False, threads=1, counters=True, observe=launches.append)
    with pytest.MonkeyPatch.context() as patch:
        if case.name in (SHARED, COUNTED):
            patch.setenv("DSAGEN_TOPK_CLUSTER", "1")
        kernels = load(name, device=DEVICE, emulator=options)
    case = fitted(case, kernels.spec)
    result, _ = run_case(RUNS[type(case)](case, lambda _: kernels, torch.device("cpu"), 1))  # type: ignore[arg-type]
    assert result.status == "passed", result.problem
    return {launch.symbol: launch.counts.measured for launch in launches if launch.counts.measured is not None}


def fitted(case: Case, spec: DeploymentSpec) -> Case:
    """The case within the spec's capacities, with a second cache where the spec has one."""
    if not isinstance(case, DecodeCase):
        return case
    extra = ExtraCase(300, 100, 5) if spec.extra_kv else None
    return replace(case, topk=min(case.topk, spec.topk), extra=extra)


_FORMS = {LogitsCase: "paged", RaggedCase: "ragged", CandidateCase: "candidates", BlockCase: "blocks"}


def reaches(spec: DeploymentSpec, case: Case) -> bool:
    """Whether the spec has what the case calls."""
    form = _FORMS.get(type(case))
    if form is not None:
        return spec.index is not None and case.op in spec.ops and form in spec.index.forms
    if isinstance(case, StepCase):
        return has_chain(spec, arch(spec.archs[0]))
    if not isinstance(case, KvCase):
        return case.op in spec.ops
    record = spec.extra_kv_format if case.extra else spec.kv_format
    return case.op in spec.ops and record is not None and (case.action is not Action.CONVERT or converts(record))


@pytest.fixture(autouse=True)
def no_choice_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a device's measured choices name beside the others are not what the emulator launches."""
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", "none")


# Specs of few heads whose portable bodies of sparse decode are held as well, for tables may name them: each kind of
# scales, and the form that waits in a step.
PORTABLE = ("v32_h16", "v41_h16", "v41_fp4_h16", "v32_decode_h16")


def kept_matrices() -> Iterator[tuple[DeploymentSpec, Matrix]]:
    """The shipped specs and what they build; while one is given, its body of sparse decode is asked for."""
    for body, names in (("", tuple(shipped_specs())), (sparse_decode.BODY, PORTABLE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(knobs.SPARSE_DECODE_BODY.name, body)
            for name in names:
                spec = load_spec(name)
                matrix = expand(spec)
                if not matrix.refused:
                    yield spec, matrix


def sections() -> dict[str, list[str]]:
    """Lines by slug, for every kernel of the shipped specs."""
    found: dict[str, list[str]] = {}
    for spec, matrix in kept_matrices():
        slugs = {plan.symbol: plan.slug for plan in matrix.plans()}
        for case in CASES:
            of_op = {plan.slug for plan in matrix.plans() if case.op == launching_op(plan)}
            if reaches(spec, case) and not of_op <= set(found):
                for symbol, counters in measure(spec.name, case).items():
                    found.setdefault(slugs[symbol], counters.lines())
    return dict(sorted(found.items()))


def text_of(found: dict[str, list[str]]) -> str:
    head = f"Counters of the shipped kernels for one small call each, with nvcc {NVCC} (tests/emulator).\n"
    return head + "".join(f"\n{slug}\n" + "".join(f"  {line}\n" for line in lines) for slug, lines in found.items())


def test_counters_are_those_of_the_golden_text(request: pytest.FixtureRequest) -> None:
    version = find_toolchain().version
    if not version.startswith(f"{NVCC}."):
        pytest.skip(f"the golden counters are of nvcc {NVCC}, this is {version}")
    text = text_of(sections())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, UPDATE


def test_every_shipped_kernel_is_in_the_golden_text() -> None:
    held = set(re.findall(r"^[a-z]\S+$", GOLDEN.read_text(), re.MULTILINE))
    assert held == {plan.slug for _, matrix in kept_matrices() for plan in matrix.plans()}, UPDATE


def test_counters_do_not_depend_on_the_order_of_warps() -> None:
    first = measure("v32_h16", CASES[0])
    assert all(measure("v32_h16", CASES[0], seed) == first for seed in (1, 2, 3))


@pytest.mark.parametrize("seed", [0, 1])
def test_counters_of_atomics_repeat(seed: int) -> None:
    """Who comes first at an atomic decides where it writes, so the order counts there; the same one counts the same."""
    assert measure("v32_topk_h128", CASES[1], seed) == measure("v32_topk_h128", CASES[1], seed)
