"""The check of top-k: its reference, its cases, that right kernels pass and wrong ones do not."""

from __future__ import annotations

import json

import pytest
import torch

from dsagen.check.recording import record_report
from dsagen.check.report import CaseResult, CheckReport
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.check.topk_cases import (
    FAR_ROW_ELEMENTS,
    MOST_SLOTS,
    Ids,
    Probe,
    Scores,
    TopkCase,
    Windows,
    topk_cases,
)
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.spec import load_spec

CPU = torch.device("cpu")
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["topk"]}


class ModelTopk:
    """The op in torch on a CPU; `defect` makes it wrong in one way."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def topk(self, scores, *, k, drop_neg_inf, out, raw, counts, lengths=None, starts=None, **transform):
        self.calls += 1
        assert scores.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[self.spec.scores]
        assert 1 <= k <= self.spec.selected_topk
        if self.defect == "prefers high indices":
            found, count = self._reversed(scores, k, lengths)
        else:
            if self.defect == "reads past the window":
                lengths = None
            if self.defect == "keeps 4096 candidates":
                scores = scores.clone()
                scores[:, 4096:] = -torch.inf
            drops = drop_neg_inf and self.defect != "keeps -inf"
            found, count = topk_reference(scores, k, lengths=lengths, starts=starts, drop_neg_inf=drops)
        if "candidate_blocks" in transform:
            transform = {"page_table": transform["candidate_blocks"], "page_size": 8}
        if self.defect == "ignores offsets":
            transform.pop("offsets", None)
        raw.copy_(found)
        out.copy_(translate_reference(found, **transform))
        counts.copy_(count)
        if self.defect == "leaves slots":
            out[found < 0] = -77
        if self.defect == "writes past the slots":
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).fill_(0)
        if self.defect == "is not the same each time" and self.calls % 7 == 0:
            out.copy_(out.flip(1))
        return out.clone() if self.defect == "returns another tensor" else out

    def _reversed(self, scores, k, lengths):
        width = scores.shape[1]
        found, count = topk_reference(scores.flip(1), k)
        return torch.where(found >= 0, width - 1 - found, found).sort(1).values, count


def results_of(cases, defect="", scores="fp32"):
    spec = load_spec({**SPEC, "scores": scores})
    kernels = KernelCache(spec, CPU, lambda s, device: ModelTopk(s, defect))
    return run_cases(cases, kernels, CPU, seed=3)


@pytest.mark.parametrize("drops", [False, True])
def test_the_reference_sorts(drops):
    inf, nan = torch.inf, torch.nan
    scores = torch.tensor([[1.0, nan, -inf, 2.0, -0.0, 0.0, -inf, nan, 2.0]])
    for k, want in (
        (1, [3]),
        (2, [3, 8]),
        (4, [0, 3, 4, 8]),
        (6, [0, 3, 4, 5, 8] if drops else [0, 2, 3, 4, 5, 8]),
        (8, [0, 3, 4, 5, 8] if drops else [0, 1, 2, 3, 4, 5, 6, 8]),
        (12, [0, 3, 4, 5, 8] if drops else list(range(9))),
    ):
        found, count = topk_reference(scores, k, drop_neg_inf=drops)
        assert found.tolist() == [want + [-1] * (k - len(want))]
        assert count.tolist() == [len(want)]


def test_the_reference_bounds_windows():
    scores = torch.arange(10.0).repeat(4, 1)
    lengths, starts = torch.tensor([3, 99, -1, 4]), torch.tensor([2, 7, 0, -5])
    found, count = topk_reference(scores, 3, lengths=lengths, starts=starts)
    assert found.tolist() == [[0, 1, 2], [0, 1, 2], [-1, -1, -1], [1, 2, 3]]
    assert count.tolist() == [3, 3, 0, 3]


def test_the_reference_translates():
    indices = torch.tensor([[0, 5, 6, 11, -1]] * 3)
    table = torch.tensor([[10, 20, -1], [7, 8, 9]])
    paged = translate_reference(indices, page_table=table, page_size=4, table_of_row=torch.tensor([0, 1, 2]))
    assert paged.tolist() == [[40, 81, 82, -1, -1], [28, 33, 34, 39, -1], [-1] * 5]
    started = translate_reference(
        indices,
        page_table=table,
        page_size=4,
        table_of_row=torch.tensor([1, 1, 1]),
        table_starts=torch.tensor([0, 1, -1]),
    )
    assert started.tolist() == [[28, 33, 34, 39, -1], [32, 37, 38, -1, -1], [-1, 29, 30, 35, -1]]
    moved = translate_reference(indices, offsets=torch.tensor([100, -6, 2**31 - 6]))
    assert moved.tolist() == [[100, 105, 106, 111, -1], [-1, -1, 0, 5, -1], [2**31 - 6, 2**31 - 1, -1, -1, -1]]


def test_the_lists_are_complete():
    quick, full = topk_cases("quick"), topk_cases("full")
    assert {c.scores for c in quick} == set(Scores) and {c.windows for c in quick} == set(Windows)
    assert {c.ids for c in quick} == set(Ids) and {c.probe for c in quick} == set(Probe)
    assert {c.misaligned for c in quick} >= set(range(8))
    assert {(c.rows, c.k) for c in full if "peer" in c.name} >= {
        (r, k) for r in (1, 32) for k in (512, 1024, 2048, 3000)
    }
    assert any(c.rows > 65535 for c in full) and any(c.width >= 1 << 22 for c in full) and any(c.far for c in full)
    assert FAR_ROW_ELEMENTS > 2**32 and max(c.k for c in quick) == MOST_SLOTS
    assert set(quick) < set(full)
    assert len({c.name for c in full}) == len(full) and all(c.name.startswith("topk.") for c in full)


def cpu_cases():
    return [case for case in topk_cases("quick") if case.probe is not Probe.GRAPH]


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_a_right_implementation_passes(scores):
    cases = cpu_cases()
    results = results_of(cases, scores=scores)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) > 130 and {r.op for r in results} == {"topk"}


WINDOWED = TopkCase("topk.small", 9, 6000, 100, windows=Windows.LENGTHS)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("prefers high indices", TopkCase("topk.x", 3, 900, 64, Scores.TWO_VALUES), "raw[0, "),
        ("keeps 4096 candidates", TopkCase("topk.x", 3, 9000, 64, Scores.LOW_10_BITS), "raw[0, "),
        ("reads past the window", WINDOWED, "counts[1, 0] = 100 (an id), expected 0; "),
        ("keeps -inf", TopkCase("topk.x", 3, 900, 64, Scores.ALL_NEG_INF, drop_neg_inf=True), "counts[0, 0] = 64"),
        ("ignores offsets", TopkCase("topk.x", 3, 900, 64, ids=Ids.OFFSET), "out[0, 0] = "),
        ("leaves slots", WINDOWED, "out[1, 0] = -77 (which was not written), expected -1; "),
        ("writes past the slots", WINDOWED, "out[0, 100] = 0 (an id), expected -77; 1 slots differ"),
        ("is not the same each time", TopkCase("topk.x", 3, 900, 64, probe=Probe.REPEATED), "run 7: out[0, 0] = "),
        ("returns another tensor", WINDOWED, "the op did not return the output that it was given"),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


def test_graphs_do_not_run_without_a_device():
    (result,) = results_of([case for case in topk_cases("quick") if case.name == "topk.graph.logical"])
    assert (result.status, result.problem) == ("not_run", "needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_spec_is_checked_op_by_op():
    report = run_check(load_spec({**SPEC, "ops": ["topk", "sparse_decode"]}), seed=1)
    assert [r.status for r in report.host_results] == ["passed"] * 4
    assert {r.op for r in report.results} == {"topk", "sparse_decode"}
    assert report.of_op("topk").count("not_run") == len(topk_cases("quick"))
    alone = run_check(load_spec(SPEC), "full", seed=1)
    assert [r.name for r in alone.host_results] == [
        "host.every cell renders",
        "host.selections are those of sorted lists",
    ]
    assert len(cases_of(load_spec(SPEC), "sm_90a", "quick", "topk.data.*")) == 2 * 3 * len(Scores)


@pytest.mark.compile
def test_cases_are_evidence_for_the_kernels_of_their_op_only(tmp_path):
    from dsagen.build import Store, build_units, find_toolchain
    from dsagen.matrix import expand
    from dsagen.render import render

    spec = load_spec({**SPEC, "ops": ["topk", "sparse_decode"]})
    store = Store.open()
    build_units([render(plan) for plan in expand(spec).plans()], store, lambda: find_toolchain({"sm_90a": (12, 8)}))
    results = tuple(CaseResult(f"topk.{i}", "passed", op="topk") for i in range(3))
    results += (CaseResult("page.1", "failed", op="sparse_decode"),)
    report = CheckReport(spec.name, "quick", 1, "NVIDIA H200", "", results, ())
    record_report(spec, "sm_90a", report, tmp_path / "rows.jsonl", store)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = {row["slug"].split("-")[0]: (row["passed"], row["failed"]) for row in rows}
    assert found == {"topk": (3, 0), "sparse_decode": (0, 1)}
