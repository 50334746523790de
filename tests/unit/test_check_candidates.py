"""The check of logits in candidate blocks: a right implementation passes every case, each wrong one fails."""

from __future__ import annotations

import pytest
import torch

from dsagen.check.candidate_cases import CandidateCase, Lists, candidate_cases
from dsagen.check.candidate_run import make_candidate_inputs
from dsagen.check.indexer_cases import HEADS, Contents, Lengths, LogitsCase, Probe
from dsagen.check.run import KernelCache, cases_of, run_cases
from dsagen.families.indexer_logits.reference import candidates_reference
from dsagen.index_format import index_format
from dsagen.spec import load_spec

CPU = torch.device("cpu")
INDEX = {"heads": 16, "forms": ["candidates"]}
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": INDEX}


class ModelCandidates:
    """The op by its reference, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def logits_slugs(self, form):
        return (f"{form} kernel",)

    def indexer_logits_candidates(
        self, q, k_cache, weights, context_lens, block_table, candidate_blocks, *, block_size, out, q_scales=None
    ):
        self.calls += 1
        blocks, record = candidate_blocks, index_format(self.spec.index.keys)
        if self.defect == "assumes lists without gaps":
            blocks = blocks.as_strided(blocks.shape, (blocks.shape[1], 1))
        if self.defect == "takes no block for the first":
            blocks = blocks.clamp(min=0)
        if self.defect == "takes a request's first list":
            blocks = blocks.view(len(q), -1, blocks.shape[1])[:, :1].expand(-1, q.shape[1], -1).flatten(0, 1)
        if self.defect == "scores keys past the length":
            context_lens = (context_lens + 7) // 8 * 8
        scores = candidates_reference(
            q, k_cache, weights, context_lens, block_table, blocks, record, block_size, q_scales=q_scales
        )
        again = self.defect == "differs each time" and self.calls > 1
        if again or (self.defect == "differs among others" and len(q) > 1):
            scores = scores * (1 + 2.0**-22)
        written = torch.ones_like(scores, dtype=torch.bool)
        if self.defect == "leaves slots without a block":
            written = (candidate_blocks >= 0).repeat_interleave(block_size, 1)
        out[written] = scores[written].to(out.dtype)
        return out.clone() if self.defect == "returns another tensor" else out


def results_of(cases, defect="", **index):
    spec = load_spec({**SPEC, "index": {**INDEX, **index}})
    return run_cases(cases, KernelCache(spec, CPU, lambda s, device: ModelCandidates(s, defect)), CPU, seed=3)


def test_a_right_implementation_passes():
    cases = [case for case in candidate_cases("quick", True) if case.probe is not Probe.GRAPH]
    cases = [case for case in cases if case.rows < 100 and case.call.width < 1000]
    results = results_of(cases)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) > 40 and {r.op for r in results} == {"indexer_logits"}


def test_keys_with_scales_of_blocks():
    cases = [c for c in candidate_cases("quick", False) if "contents" in c.name or "list" in c.name]
    assert {r.status for r in results_of(cases[:8], keys="mxfp4", dim=32)} == {"passed"}


def test_the_lists_are_complete():
    quick, full = candidate_cases("quick", True), candidate_cases("full", True)
    assert set(quick) < set(full) and len({case.name for case in full}) == len(full)
    assert {c.call.contents for c in quick} == set(Contents) and {c.call.lengths for c in quick} == set(Lengths)
    assert {c.lists for c in quick} == set(Lists) and {c.block_size for c in quick} == {8, 16}
    assert {c.probe for c in quick} == set(Probe) and {c.heads for c in quick} == {*HEADS, None}
    both = load_spec({**SPEC, "index": {"heads": 16, "forms": ["paged", "candidates"]}})
    assert {case.name.split(".")[0] for case in cases_of(both, "sm_90a", "quick")} == {"logits", "candidates"}


PLAIN = CandidateCase("candidates.x", LogitsCase("", 3, 2))
STRIDED = CandidateCase("candidates.x", LogitsCase("", 3, 2, strided=True))


def probed(probe):
    return CandidateCase("candidates.x", LogitsCase("", contents=Contents.NORMAL, probe=probe))


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("assumes lists without gaps", STRIDED, "scores: scores["),
        ("takes no block for the first", PLAIN, "scores: scores["),
        ("takes a request's first list", PLAIN, "scores: scores["),
        ("scores keys past the length", PLAIN, "scores: scores["),
        ("differs among others", probed(Probe.ALONE), "request 0 by itself"),
        ("differs each time", probed(Probe.REPEATED), "run 2: scores["),
        ("leaves slots without a block", PLAIN, "scores: scores["),
        ("returns another tensor", PLAIN, "the op did not return the output that it was given"),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


def test_a_case_is_evidence_for_kernels_of_its_form_only():
    assert [r.slugs for r in results_of([PLAIN])] == [None]
    assert [r.slugs for r in results_of([PLAIN], forms=["paged", "candidates"])] == [("candidates kernel",)]


def test_lists_are_as_named():
    index, generator = load_spec(SPEC).index, torch.Generator().manual_seed(1)
    call = LogitsCase("", 2, 2, 100, lengths=Lengths.WHOLE)

    def blocks(lists):
        case = CandidateCase("candidates.x", call, 9, lists=lists)
        return make_candidate_inputs(case, index_format("fp8"), index, generator).blocks

    drawn, in_order, wild = (blocks(lists) for lists in (Lists.DRAWN, Lists.SORTED, Lists.WILD))
    assert bool((drawn == -1).any(1).all()) and bool((drawn == 12).any(1).all()) and int(drawn.max()) == 12
    assert bool((in_order.diff(dim=1) > 0).all())
    assert int(wild.min()) == -(2**31) and int(wild.max()) == 2**31 - 1
    assert bool((blocks(Lists.EMPTY) == -1).all())


def test_scores_by_hand():
    """One head that reads a key's first dim, in which its number is, on pages of 3 keys in reverse."""

    def code(value):
        return torch.tensor(float(value)).to(torch.float8_e4m3fn).view(torch.uint8)

    q = torch.zeros(1, 1, 8, 32, dtype=torch.uint8)
    q[0, 0, 0, 0] = code(1)
    pool = torch.zeros(8, 3, 1, 36, dtype=torch.uint8)
    pages = pool.view(8, -1)
    for key in range(20):
        page, offset = 7 - key // 3, key % 3
        pages[page, 32 * offset] = code(key % 16)
        pages[page, 96 + 4 * offset : 100 + 4 * offset] = torch.tensor([2.0 if key > 15 else 1.0]).view(torch.uint8)
    table = torch.arange(7, -1, -1, dtype=torch.int32).view(1, 8)
    blocks, lens = torch.tensor([[2, -1, 1]], dtype=torch.int32), torch.tensor([[19]], dtype=torch.int32)
    found = candidates_reference(q, pool, torch.ones(1, 8), lens, table, blocks, index_format("fp8"), 8)
    # Of block 2 keys 16 to 18 are seen, with scales of 2.
    none = float("-inf")
    assert found.tolist() == [[0.0, 2.0, 4.0, *[none] * 13, *map(float, range(8, 16))]]
