"""Which kernels of top-k the check's cases launch, and what evidence that is for them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from test_check_topk import CPU, SPEC, ModelTopk, results_of

from dsagen.arch import ARCHS
from dsagen.check.recording import record_report
from dsagen.check.report import CaseResult, CheckReport
from dsagen.check.topk_calls import MODES
from dsagen.check.topk_cases import BODY_SCORES, MOST_SLOTS, Ids, Probe, Scores, TopkCase, Windows, topk_cases
from dsagen.check.topk_inputs import make_inputs
from dsagen.errors import GuardError
from dsagen.families.topk.geometry import LIST_ELEMENTS
from dsagen.families.topk.op import TopkShape, choose, most_lead
from dsagen.matrix import expand
from dsagen.spec import load_spec


@pytest.mark.compile
def test_cases_are_evidence_for_the_kernels_of_their_op_only(tmp_path):
    from dsagen.build import Store, build_units, find_toolchain
    from dsagen.render import render

    spec = load_spec({**SPEC, "ops": ["topk", "sparse_decode"]})
    store = Store.open()
    build_units([render(plan) for plan in expand(spec).plans()], store, lambda: find_toolchain({"sm_90a": (12, 8)}))
    small, large, swept, *shared = (p.slug for p in expand(spec).plans() if p.variant.family == "topk")
    launched = [("passed", (small,)), ("passed", tuple(shared)), ("failed", (small, *shared)), ("passed", (small,))]
    # What failed before a launch speaks of every kernel that is recorded, and makes none of one that never ran.
    launched += [("failed", ()), ("not_run", ())]
    results = tuple(CaseResult(f"topk.{i}", how, op="topk", slugs=s) for i, (how, s) in enumerate(launched))
    results += (CaseResult("page.1", "failed", op="sparse_decode"),)
    report = CheckReport(spec.name, "quick", 1, "NVIDIA H200", "", results, ())
    record_report(spec, "sm_90a", report, tmp_path / "rows.jsonl", store)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = {row["slug"]: (row["passed"], row["failed"], row["not_run"]) for row in rows}
    decode = {plan.slug: (0, 1, 0) for plan in expand(spec).plans() if plan.variant.family != "topk"}
    assert found == {small: (2, 2, 1), **dict.fromkeys(shared, (1, 2, 1)), **decode}
    assert not {large, swept} & set(found)


def test_a_case_tells_the_kernels_that_it_launched():
    class Named(ModelTopk):
        def topk_slugs(self, scores, *, k, starts=None):
            return ("one", "two") if scores.shape[0] > 1 else ("three",)

    case = TopkCase("topk.x", 3, 900, 64, probe=Probe.ALONE)
    (plain,) = results_of([replace(case, probe=Probe.PLAIN)], model=Named)
    (alone,) = results_of([case], model=Named)
    assert (plain.slugs, alone.slugs) == (("one", "two"), ("one", "three", "two"))

    class Refusing(Named):
        def topk_slugs(self, scores, **_):
            raise GuardError("[T-01] no")

    (refused,) = results_of([case], model=Refusing)
    assert (refused.status, refused.slugs) == ("failed", ())


SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90a": 132, "sm_100a": 148, "sm_103a": 160, "sm_110a": 20}
SMS |= {"sm_120a": 188, "sm_121a": 48}


@pytest.mark.parametrize("tier", ["quick", "full"])
@pytest.mark.parametrize("scores", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_launched_by_cases_of_every_kind(arch, scores, tier):
    plans = {}
    for plan in expand(load_spec({**SPEC, "archs": [arch], "scores": scores})).plans():
        plans.setdefault(plan.variant.kernel, []).append(plan)
    kinds = {plan.slug: set() for group in plans.values() for plan in group}
    for case in topk_cases(tier, MODES):
        odd = case.misaligned or case.gap or case.windows is Windows.BOTH
        shape = TopkShape(case.rows, case.width, case.k, MOST_SLOTS, most_lead(scores) if odd else 0)
        for plan in choose(plans, shape, SMS[arch]).plans:
            kinds[plan.slug] |= {case.scores, case.windows, case.mode, case.probe, case.ids}
    wanted = {*BODY_SCORES, Scores.NEG_INF_TAIL, Scores.INFINITIES, Windows.WHOLE, Windows.BOTH, Windows.LENGTHS}
    wanted |= {*MODES, Probe.PLAIN, Probe.REPEATED, Probe.GRAPH, Ids.LOGICAL, Ids.PAGED}
    assert {slug: wanted - found for slug, found in kinds.items() if not wanted <= found} == {}


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_rows_that_blocks_share_are_checked_with_lists_that_suffice_and_that_overflow(scores):
    """By the reference's keys: what ties with the k-th score in its first 11 bits."""
    room, found = LIST_ELEMENTS, set()
    for case in topk_cases("quick"):
        if not case.name.startswith("topk.body.shared.") or case.windows is not Windows.WHOLE or case.k != 2048:
            continue
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[scores]
        row = make_inputs(replace(case, rows=1), dtype, CPU, torch.Generator().manual_seed(1)).scores[0].float()
        ordered = row[~row.isnan()].sort(descending=True).values
        bins = ordered.view(torch.int32) >> 21
        if len(ordered) > case.k and case.probe is Probe.PLAIN:
            # All that is above the k-th score's bin, and the bin.
            last = bins[case.k - 1]
            fits = int((bins == last).nonzero()[-1]) + 1 <= room
            found.add((fits, "constant" if ordered[0] == ordered[-1] else "varied"))
    assert found >= {(True, "varied"), (False, "varied"), (False, "constant")}
