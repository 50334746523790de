"""The check of logits over keys in one piece: a right implementation passes every case, each wrong one fails."""

from __future__ import annotations

import pytest
import torch

from dsagen.check.indexer_cases import HEADS, Contents, Probe
from dsagen.check.ragged_cases import RaggedCase, Windows, ragged_cases
from dsagen.check.ragged_run import make_ragged_inputs
from dsagen.check.run import KernelCache, cases_of, run_cases
from dsagen.families.indexer_logits.reference import ragged_reference, window_reference
from dsagen.index_format import index_format
from dsagen.spec import load_spec

CPU = torch.device("cpu")
INDEX = {"heads": 16, "forms": ["ragged"]}
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": INDEX}


class ModelRagged:
    """The op by its reference, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def logits_slugs(self, form):
        return (f"{form} kernel",)

    def indexer_logits_ragged(
        self,
        q,
        keys,
        key_scales,
        weights,
        starts,
        ends,
        *,
        out,
        max_window,
        unscored_up_to,
        fill_neg_inf,
        q_scales=None,
    ):
        self.calls += 1
        if self.defect == "assumes windows without strides":
            starts, ends = (t.as_strided(t.shape, (1,)) for t in (starts, ends))
        if self.defect == "assumes keys without gaps":
            keys = keys.as_strided(keys.shape, (keys.shape[1], 1))
        if self.defect == "takes q's scales for ones" and q_scales is not None:
            q_scales = torch.full_like(q_scales, 0x7F7F7F7F)
        record, skipped = index_format(self.spec.index.keys), unscored_up_to
        if self.defect == "scores every row":
            skipped = 0
        given = (q, keys, key_scales, weights, starts, ends, record, max_window)
        scores, scored = ragged_reference(*given, q_scales=q_scales, unscored_up_to=skipped)
        _, seen = ragged_reference(*given, q_scales=q_scales)
        if self.defect == "differs among others" and len(q) > 1:
            scores = scores * (1 + 2.0**-22)
        if self.defect == "differs each time" and self.calls > 1:
            scores = scores * (1 + 2.0**-22)
        if self.defect == "begins compressed rows at key 0" and max_window is not None:
            scores = scores.roll(1, 1)
        if self.defect == "scores a key more":
            scored = scored | (scored.roll(1, 1) & ~seen)
        out[scored] = scores[scored].to(out.dtype)
        if fill_neg_inf and self.defect != "does not fill":
            out.masked_fill_(~seen, -torch.inf)
        if self.defect == "fills before the window only":
            out[:, -1] = 0
        return out.clone() if self.defect == "returns another tensor" else out


def results_of(cases, defect="", **index):
    spec = load_spec({**SPEC, "index": {**INDEX, **index}})
    return run_cases(cases, KernelCache(spec, CPU, lambda s, device: ModelRagged(s, defect)), CPU, seed=3)


def test_a_right_implementation_passes():
    cases = [case for case in ragged_cases("quick", True) if case.probe is not Probe.GRAPH and case.keys < 2000]
    cases = [case for case in cases if case.tokens < 100]
    results = results_of(cases)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) > 40 and {r.op for r in results} == {"indexer_logits"}


@pytest.mark.parametrize("keys", ["mxfp8", "mxfp4"])
def test_keys_with_scales_of_blocks(keys):
    cases = [c for c in ragged_cases("quick", keys == "mxfp8") if "contents" in c.name or "place" in c.name]
    assert {r.status for r in results_of(cases, keys=keys, dim=32)} == {"passed"}
    (result,) = results_of(cases[:1], "takes q's scales for ones", keys=keys)
    assert result.problem.startswith("scores: scores[")


def test_the_lists_are_complete():
    quick, full = ragged_cases("quick", True), ragged_cases("full", True)
    assert set(quick) < set(full) and len({case.name for case in full}) == len(full)
    assert {c.contents for c in quick} == set(Contents) and {c.windows for c in quick} == set(Windows)
    assert {c.probe for c in quick} == set(Probe) and {c.heads for c in quick} == {*HEADS, None}
    assert {c.key_gap % 16 for c in quick} == {0, 4} and {c.max_window is None for c in quick} == {True, False}
    both = load_spec({**SPEC, "index": {"heads": 16, "forms": ["paged", "ragged"]}})
    names = {case.name.split(".")[0] for case in cases_of(both, "sm_90a", "quick")}
    assert names == {"logits", "ragged"}
    assert {case.name.split(".")[0] for case in cases_of(load_spec(SPEC), "sm_90a", "quick")} == {"ragged"}
    four = load_spec({**SPEC, "index": {**INDEX, "keys": "mxfp4"}})
    assert not any("nan_keys" in case.name for case in cases_of(four, "sm_90a", "quick"))


COMPRESSED = RaggedCase("ragged.x", max_window=90, fill=True)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("assumes windows without strides", RaggedCase("ragged.x", strided=True), ""),
        ("assumes keys without gaps", RaggedCase("ragged.x", key_gap=16), "scores: scores["),
        ("scores every row", RaggedCase("ragged.x", 12, unscored=150), "columns that nothing should write: scores["),
        ("differs among others", RaggedCase("ragged.x", contents=Contents.NORMAL, probe=Probe.ALONE), "token 0 by"),
        ("differs each time", RaggedCase("ragged.x", contents=Contents.NORMAL, probe=Probe.REPEATED), "run 2: scores["),
        ("begins compressed rows at key 0", COMPRESSED, "scores: scores["),
        ("scores a key more", RaggedCase("ragged.x"), "columns that nothing should write: scores["),
        ("does not fill", COMPRESSED, "columns outside of the window: scores["),
        ("fills before the window only", RaggedCase("ragged.x", fill=True), "columns outside of the window: scores["),
        ("returns another tensor", RaggedCase("ragged.x"), "the op did not return the output that it was given"),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


def test_a_case_is_evidence_for_kernels_of_its_form_only():
    case = RaggedCase("ragged.x")
    assert [r.slugs for r in results_of([case])] == [None]
    assert [r.slugs for r in results_of([case], forms=["paged", "ragged"])] == [("ragged kernel",)]


def test_windows_by_hand():
    starts, ends = torch.tensor([2, -3, 5, 4, 0, 9]), torch.tensor([4, 2, 99, 1, 0, 12])
    first, count = window_reference(starts, ends, 8, None)
    assert (first.tolist(), count.tolist()) == ([2, 0, 5, 0, 0, 0], [2, 2, 3, 0, 0, 0])
    assert window_reference(starts, ends, 8, 2)[1].tolist() == [2, 2, 2, 0, 0, 0]


def test_what_no_token_sees_is_nan():
    case = RaggedCase("ragged.x", 4, 100, windows=Windows.PROMPTS, key_gap=4)
    inputs = make_ragged_inputs(case, index_format("fp8"), load_spec(SPEC).index, torch.Generator().manual_seed(1))
    seen = torch.zeros(100, dtype=torch.bool)
    for start, end in zip(inputs.starts.tolist(), inputs.ends.tolist(), strict=True):
        seen[start:end] = True
    assert 0 < int(seen.sum()) < 100
    assert inputs.key_scales.isnan().equal(~seen)
    assert bool((inputs.keys.view(torch.uint8)[~seen] == 0xFF).all())
