"""Faults that selections elsewhere were reported with, and the tests here that would fail with each of them.

Each row says in our words what happens, what should, and which tests hold it: cases of `dsagen check` that a model with
that very fault must fail, and tests of this project.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from test_check_topk import ModelTopk, call_again, results_of, small
from test_runtime_topk import LONG, ROWS, WIDTH, K, ints, make

from dsagen.arch import ARCHS
from dsagen.check.topk_cases import topk_cases
from dsagen.check.topk_run import TopkRun
from dsagen.matrix import expand
from dsagen.spec import load_spec

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fault:
    """`defect` is a fault of the model in test_check_topk.py, `cases` are check cases that it must fail."""

    happens: str
    should: str
    tests: tuple[str, ...]
    defect: str = ""
    cases: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {
    "lost candidates": Fault(
        "More candidates share the threshold's coarse bin than the buffer holds, and the rest is dropped unnoticed.",
        "A full buffer costs another sweep; the selected scores are those of a full sort.",
        (
            "host_model/test_topk.py::test_reported_rows",
            "host_model/test_topk.py::test_every_way_through_the_levels",
            "host_model/test_topk.py::test_a_full_list_costs_a_sweep_and_no_element",
            "host_model/test_topk.py::test_a_row_with_more_candidates_than_the_list_that_is_built_holds",
        ),
        "keeps 1024 candidates",
        ("topk.data.low_14_bits.k2048", "topk.data.low_21_bits.k2048", "topk.digit.one_digit.11_11"),
    ),
    "unwritten slots": Fault(
        "With more ties than their buffer holds, slots stay unwritten, and what was in them is translated to pages.",
        "Every slot is written, those behind the last id with -1.",
        ("host_model/test_topk.py::test_reported_rows",),
        "has room for 1024 ties",
        ("topk.data.few_above_ties.k2048", "topk.data.constant.k2048", "topk.data.two_values.k2048"),
    ),
    "overrun buffer": Fault(
        "Scores that differ in their lowest ten bits only overrun the candidate buffer: an illegal access.",
        "Shared memory is bounded, whatever the data, and the result exact.",
        (
            "host_model/test_topk.py::test_reported_rows",
            "emulator/test_conformance_emulated.py::test_case",
            "unit/test_check_topk.py::test_a_wrong_implementation_fails",
        ),
        "skips a digit",
        ("topk.data.low_10_bits.k2048", "topk.digit.one_digit.22_10"),
    ),
    "garbage for NaN": Fault(
        "Rows with NaN give indices from shared memory that nobody wrote.",
        "NaN are the lowest scores; every slot is an index of the window or -1.",
        ("host_model/test_topk.py::test_reported_rows", "emulator/test_conformance_emulated.py::test_case"),
        "garbage for NaN",
        ("topk.data.all_nan.k512", "topk.data.some_nan.k2048", "topk.repeated.some_nan"),
    ),
    "another set each time": Fault(
        "Where a plateau of equal scores crosses the last slot, each run picks other members of it.",
        "The lowest indices among equals, in every run; said where it is not promised.",
        ("host_model/test_topk.py::test_results_do_not_depend_on_the_schedule",),
        "another set each time",
        ("topk.repeated.plateau", "topk.repeated.constant", "topk.data.plateau.k2048"),
    ),
    "blocks that wait": Fault(
        "Blocks wait for each other, and more of them are launched than fit the device at once: a deadlock.",
        "Blocks wait for others only where they are proven to run together.",
        (
            # It runs the blocks of a grid one after another, each to its end: a wait for a later one would not end.
            "emulator/test_conformance_emulated.py::test_case",
        ),
    ),
    "too large for the device": Fault(
        "Long rows ask for more blocks or more shared memory than the device has, which a captured graph does not say.",
        "The device's own figures decide when a plan is made, and what does not fit is refused there.",
        (
            "unit/test_topk_family.py::test_a_plan_that_breaks_a_limit_is_refused_with_the_slug",
            "unit/test_topk_family.py::test_a_row_that_does_not_fit_its_block_is_refused",
            "unit/test_runtime_topk_plan.py::test_a_lent_workspace_must_fit",
            "unit/test_topk_reports.py::test_plans_fit_the_smallest_shared_memory",
            "unit/test_runtime_topk.py::test_capture_needs_a_loaded_kernel",
        ),
    ),
    "clusters where there are none": Fault(
        "A launch in clusters is refused by an arch that has none of that size, when it is called.",
        "What an arch cannot do is not planned for it.",
        ("unit/test_topk_reports.py::test_no_plan_asks_for_what_its_arch_lacks",),
    ),
    "reset left out of a graph": Fault(
        "A graph captured with short rows leaves out a reset that longer rows need when it is replayed.",
        "Nothing that depends on lengths is decided on the host.",
        ("unit/test_topk_reports.py::test_graphs_are_captured_with_shorter_rows",),
        "resets by captured lengths",
        ("topk.graph.logical", "topk.graph.paged", "topk.graph.long"),
    ),
    "stale scratch": Fault(
        "A captured graph keeps the address of scratch memory that was given back and serves others at the replay.",
        "A call with a plan allocates nothing but a missing output; workspaces belong to plans.",
        (
            "unit/test_topk_reports.py::test_memory_is_written_over_between_capture_and_replay",
            "unit/test_topk_reports.py::test_a_call_with_its_output_allocates_nothing",
            "unit/test_runtime_topk_plan.py::test_capture_needs_a_plan_of_rows_that_blocks_share",
        ),
    ),
    "another order each time": Fault(
        "Ranks select the same set in different orders, since slots go to whoever comes first.",
        "Whoever asks for order gets the one that is the same for everyone: ascending.",
        (
            "host_model/test_topk.py::test_results_do_not_depend_on_the_schedule",
            "unit/test_runtime_topk.py::test_only_order_asks_the_kernel_for_it",
        ),
        "is not the same each time",
        ("topk.repeated.normal", "topk.repeated.low_10_bits"),
    ),
    "rows longer than planned": Fault(
        "Rows longer than a streaming kernel was made for write past shared memory; something else is blamed.",
        "Bounds hold for any length, and a fault names op, kernel and arguments.",
        (
            "emulator/test_conformance_emulated.py::test_case",
            "host_model/test_topk.py::test_the_kernels_that_are_built",
            "unit/test_runtime_topk.py::test_a_failing_launch_names_op_kernel_and_arguments",
            "unit/test_runtime_launch.py::test_debug_sync_finds_the_kernel_that_faults",
        ),
    ),
    "guessed meaning of ids": Fault(
        "What ids mean is guessed from another phase's settings, and the wrong tensor is asked for.",
        "Each call says what ids become, and contradictions are named.",
        ("unit/test_runtime_topk.py::test_what_does_not_fit_is_named",),
        "ignores offsets",
        ("topk.ids.offset", "topk.ids.offset.started"),
    ),
}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_tests_exist(fault):
    assert fault.tests
    for name in fault.tests:
        file, function = name.split("::")
        assert function in functions_of(file), name


@pytest.mark.parametrize(("title", "name"), [(title, name) for title, fault in FAULTS.items() for name in fault.cases])
def test_the_cases_fail_with_the_fault(title, name):
    (case,) = [case for case in topk_cases("quick") if case.name == name]
    case = small(case)
    (sound,) = results_of([case], capture=call_again)
    assert sound.status == "passed", sound.problem
    (result,) = results_of([case], FAULTS[title].defect, capture=call_again)
    assert result.status == "failed", f"{name} does not notice: {FAULTS[title].happens}"


# ---- what is no matter of numbers


def plans(scores):
    spec = load_spec({"model": "v32", "heads": 16, "archs": list(ARCHS), "ops": ["topk"], "scores": scores})
    return expand(spec).plans()


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_plans_fit_the_smallest_shared_memory(scores):
    smallest = min(row.smem_optin_bytes for row in ARCHS.values())
    assert smallest <= 99 * 1024
    for plan in plans(scores):
        row = ARCHS[plan.variant.arch]
        assert plan.smem_bytes <= row.smem_optin_bytes
        assert plan.threads <= row.max_threads_per_block and plan.registers_cap * plan.threads <= row.registers_per_sm


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_no_plan_asks_for_what_its_arch_lacks(scores):
    for plan in plans(scores):
        row = ARCHS[plan.variant.arch]
        # Clusters and the launch that overlaps its predecessor came with 9.0; consumer parts schedule no clusters.
        assert not getattr(plan, "cluster", None) or (9, 0) <= row.compute_capability < (12, 0)
        assert not plan.overlaps_previous or row.has_pdl


def test_graphs_are_captured_with_shorter_rows():
    (case,) = [case for case in topk_cases("quick") if case.name == "topk.graph.long"]
    case = small(case)
    longest = []

    def capture(call, device):
        call()
        longest.append("captured")
        return call

    class Watching(ModelTopk):
        def topk(self, scores, *, lengths, **options):
            longest.append(int(lengths.max()))
            return super().topk(scores, lengths=lengths, **options)

    (result,) = results_of([case], model=Watching, capture=capture)
    assert result.status == "passed", result.problem
    at = longest.index("captured")
    assert max(longest[:at]) <= 1000 < max(longest[at + 1 :])


def test_memory_is_written_over_between_capture_and_replay(monkeypatch):
    events = []
    churn = TopkRun._churn
    monkeypatch.setattr(TopkRun, "_churn", lambda run: (events.append("churn"), churn(run))[1])

    def capture(call, device):
        call()
        events.append("capture")
        return lambda: (events.append("replay"), call())

    (case,) = [case for case in topk_cases("quick") if case.name == "topk.graph.logical"]
    (result,) = results_of([small(case)], capture=capture)
    assert result.status == "passed", result.problem
    assert events == ["capture", *["churn", "replay"] * 4]
    assert all(int(tensor.min()) == 0xFF for tensor in churn(TopkRun(case, None, torch.device("cpu"), 1)))


@pytest.mark.parametrize("width", [WIDTH, LONG])
@pytest.mark.parametrize("planned", [False, True])
def test_a_call_with_its_output_allocates_nothing(monkeypatch, width, planned):
    driver, kernels = make()
    scores, out = torch.zeros(ROWS, width), ints(ROWS, K)
    plan = kernels.plan_topk(ROWS, width, K) if planned else None
    kernels.topk(scores, k=K, out=out, plan=plan)
    launches = len(driver.launches)

    def refuse(*_, **__):
        raise AssertionError("a call allocates")

    for name in ("empty", "zeros", "full", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, refuse)
    assert kernels.topk(scores, k=K, out=out, plan=plan) is out
    assert len(driver.launches) == 2 * launches == (4 if width == LONG else 2)
