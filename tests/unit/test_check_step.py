"""The check of decode steps: a right chain passes every case, each wrong one fails, on the CPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from dsagen.check.place import too_large
from dsagen.check.report import CheckReport
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.check.step_cases import StepCase, step_cases
from dsagen.families.indexer_logits.reference import limits_reference, logits_reference
from dsagen.families.sparse_decode.reference import Source, sparse_decode_reference
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.spec import load_spec

CPU = torch.device("cpu")
OPS = ["indexer_logits", "topk", "sparse_decode"]
SPEC = {"model": "v32", "heads": 4, "archs": ["sm_90a"], "ops": OPS, "index": {"heads": 8, "dim": 32}}
TWO = {**SPEC, "model": "v41", "index": {"heads": 8, "dim": 32, "keys": "fp8"}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModelStep:
    """The step by its references, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def plan_decode_step(self, batch, next_n, max_seq_len, *, k, num_splits, window=None, determinism="set"):
        return SimpleNamespace(
            k=k,
            scores=torch.zeros(batch * next_n, max_seq_len, dtype=DTYPES[self.spec.scores]),
            ids=torch.zeros(batch, next_n, k, dtype=torch.int32),
            counts=torch.zeros(batch, next_n, dtype=torch.int32),
        )

    def decode_step_slugs(self, plan):
        return ("all",)

    def decode_step(self, q, k_cache, *, plan, out, lse, softmax_scale, reuse_ids=False, kv_block_table=None, **given):
        self.calls += 1
        pool = given.get("extra_k_cache", k_cache)
        index = [given.get(name) for name in ("index_q", "index_cache", "weights", "context_lens", "block_table")]
        if not reuse_ids:
            self.select(plan, index, kv_block_table, pool.shape[1])
        ids = plan.ids.clone()
        if self.defect == "attends to one token less":
            ids[..., -1] = -1
        if self.defect == "forgets what was selected" and reuse_ids:
            ids = ids.flip(0)
        selected = Source(self.spec.extra_kv_format or self.spec.kv_format, pool, ids)
        window = given.get("indices")
        first = selected if window is None else Source(self.spec.kv_format, k_cache, window)
        found = sparse_decode_reference(
            q, first.record, first.caches, first.indices, sm_scale=softmax_scale,
            extra=None if window is None or self.defect == "leaves the second cache out" else selected,
        )  # fmt: skip
        out.copy_(found.out.view(out.shape))
        lse.copy_(found.lse.view(*q.shape[:3]).transpose(1, 2))
        if self.defect == "differs each time" and self.calls > 2:
            out.mul_(1 + 2.0**-7)
        if self.defect == "writes past its output":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return (out.clone(), lse) if self.defect == "returns another tensor" else (out, lse)

    def select(self, plan, index, kv_table, page_size):
        k, width = plan.k, plan.scores.shape[1]
        index_q, cache, _, lens, table = index
        if self.defect == "takes one length for all tokens" and lens.dim() == 1:
            lens = lens[:, None].expand(-1, index_q.shape[1])
            index[3] = lens
        record = index_format("fp8")
        scores, scored = logits_reference(*index, record, width, unscored_up_to=0 if self.defect == "scores all" else k)
        plan.scores[scored] = scores[scored].to(plan.scores.dtype)
        lengths = limits_reference(lens, *index_q.shape[:2], width).flatten()
        known = plan.scores.clone()
        if self.defect == "selects by rounded scores":
            known = known.half().view(torch.int16).bitwise_and(-(1 << 8)).view(torch.float16)
        chosen, counts = topk_reference(known, k, lengths=lengths)
        if self.defect == "takes later ones of equals":
            flipped, _ = topk_reference(known.masked_fill(torch.arange(width) >= lengths[:, None], -1e30).flip(1), k)
            chosen = torch.where(counts[:, None] == k, width - 1 - flipped, chosen)
        rows = torch.arange(len(lengths)) // index_q.shape[1]
        if self.defect == "takes a table for each token":
            rows = torch.arange(len(lengths)) % table.shape[0]
        if self.defect == "takes pages of the index for those of the KV cache":
            kv_table, page_size = None, cache.shape[1]
        own = table if kv_table is None else kv_table
        ids = translate_reference(chosen, page_table=own, page_size=page_size, table_of_row=rows)
        plan.ids.view(-1, k).copy_(ids)
        plan.counts.view(-1).copy_(torch.full_like(counts, k) if self.defect == "counts columns" else counts)


def cpu_cases():
    return [case for case in step_cases("quick") if case.name != "step.graph"]


# Of each kind of inputs one; the emulator runs the others.
FEW = ("step.lengths.edges", "step.contents.normal", "step.page.5.kv64", "step.layers")


def results_of(spec, cases, defect=""):
    kernels = KernelCache(load_spec(spec), CPU, lambda s, device: ModelStep(s, defect))
    return run_cases(cases, kernels, CPU, seed=3)


@pytest.mark.parametrize("spec", [SPEC, {**SPEC, "scores": "bf16"}, TWO], ids=["fp32", "bf16", "two caches"])
def test_a_right_chain_passes(spec):
    cases = [case for case in cpu_cases() if case.name in (FEW if spec is SPEC else FEW[2:])]
    assert [(r.name, r.problem) for r in results_of(spec, cases) if r.status != "passed"] == []


@pytest.mark.parametrize(
    ("defect", "name", "complaint"),
    [
        ("scores all", "step.k200", "was written, and nothing should score it"),
        ("takes one length for all tokens", "step.lengths.per_request", "nothing should score it|differ"),
        ("selects by rounded scores", "step.contents.normal", "ids as a set"),
        ("takes later ones of equals", "step.lengths.whole", "ids as a set"),
        ("takes a table for each token", "step.next_n4.per_token", "ids as a set"),
        ("takes pages of the index for those of the KV cache", "step.page.64.kv5", "ids as a set"),
        ("counts columns", "step.lengths.edges", "counts"),
        ("attends to one token less", "step.k1", "layer 0"),
        ("forgets what was selected", "step.layers", "layer 1"),
        ("differs each time", "step.repeated", "run 2 differs from the first"),
        ("writes past its output", "step.page.1", "outside of the outputs"),
        ("returns another tensor", "step.page.1", "did not return the outputs"),
    ],
)
def test_a_wrong_chain_fails(defect, name, complaint):
    (case,) = (case for case in cpu_cases() if case.name == name)
    (result,) = results_of(SPEC, [case], defect)
    assert result.status == "failed"
    assert re.search(complaint, result.problem), result.problem


def test_a_second_cache_that_is_left_out_fails():
    (case,) = (case for case in cpu_cases() if case.name == "step.page.5")
    assert results_of(TWO, [case])[0].status == "passed"
    assert "layer 0" in results_of(TWO, [case], "leaves the second cache out")[0].problem


def test_specs_with_the_whole_chain_have_its_cases():
    spec = load_spec(SPEC)
    names = [case.name for case in cases_of(spec, "sm_90a", "quick")]
    assert len(names) == len(set(names)) and any(name.startswith("step.") for name in names)
    for op in OPS:
        others = spec.only(*(other for other in OPS if other != op))
        assert not any(case.op == StepCase.op for case in cases_of(others, "sm_90a", "quick"))
    assert {case.name for case in step_cases("quick")} < {case.name for case in step_cases("full")}
    refused = {case.name for case in step_cases("full") if too_large(load_spec("v32_decode_h16"), case)}
    assert refused and all(name.startswith("step.large") for name in refused)


def test_a_case_of_the_chain_is_evidence_for_no_kernel():
    results = results_of(SPEC, [StepCase("step.small", 1, width=40, k=8)])
    report = CheckReport("mine", "quick", 1, "a device", "", results, ())
    assert report.conformant and not report.of_kernel("topk", "any").results


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_without_a_device_its_cases_count_as_not_run():
    report = run_check("v32_decode_h16", only="step.*", seed=1)
    assert report.results and report.count("not_run") == len(report.results)
