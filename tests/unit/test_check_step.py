"""The check of decode steps: a right chain passes every case, each wrong one fails, on the CPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from dsagen.check.indexer_cases import Contents
from dsagen.check.place import too_large
from dsagen.check.recording import launching_op
from dsagen.check.report import CheckReport
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.check.step_cases import EVERY_KIND, Selects, StepCase, step_cases
from dsagen.check.step_run import StepRun
from dsagen.dependent import is_dependent
from dsagen.families.indexer_logits.reference import (
    block_scores_reference,
    candidates_reference,
    limits_reference,
    logits_reference,
)
from dsagen.families.sparse_decode.reference import Source, sparse_decode_reference
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.index_format import index_format
from dsagen.matrix import expand
from dsagen.spec import load_spec

CPU = torch.device("cpu")
OPS = ["indexer_logits", "topk", "sparse_decode"]
SPEC = {"model": "v32", "heads": 4, "archs": ["sm_90a"], "ops": OPS, "index": {"heads": 8, "dim": 32}}
TWO = {**SPEC, "model": "v41", "index": {"heads": 8, "dim": 32, "keys": "fp8"}}
CHOOSING = {**TWO, "index": {**TWO["index"], "forms": ["paged", "blocks", "candidates"]}}
BLOCK = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModelStep:
    """The step by its references, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls, self.can_overlap, self.overlaps = spec, defect, 0, True, []

    def prepare(self):
        pass

    def plan_decode_step(
        self, batch, next_n, max_seq_len, *, k, num_splits, window=None, determinism="set", candidate_blocks=None,
        overlap=None,
    ):  # fmt: skip
        self.overlaps.append(overlap)
        rows, columns = batch * next_n, -(-max_seq_len // BLOCK)
        slots = min(candidate_blocks or 0, columns)
        level = SimpleNamespace(
            block_scores=torch.zeros(rows, columns, dtype=DTYPES[self.spec.scores]),
            block_counts=torch.zeros(rows, dtype=torch.int32),
            blocks=torch.zeros(rows, slots, dtype=torch.int32),
            pages=torch.zeros(rows, slots, dtype=torch.int32),
            compact=torch.zeros(rows, slots * BLOCK, dtype=DTYPES[self.spec.scores]),
        )
        return SimpleNamespace(
            k=k,
            scores=torch.zeros(batch * next_n, max_seq_len, dtype=DTYPES[self.spec.scores]),
            ids=torch.zeros(batch, next_n, k, dtype=torch.int32),
            counts=torch.zeros(batch, next_n, dtype=torch.int32),
            candidates=level if candidate_blocks else None,
        )

    def decode_step_slugs(self, plan, candidates=None):
        return ("all",)

    def decode_step(
        self, q, k_cache, *, plan, out, lse, softmax_scale, reuse_ids=False, kv_block_table=None, candidates=None,
        **given,
    ):  # fmt: skip
        self.calls += 1
        pool = given.get("extra_k_cache", k_cache)
        index = [given.get(name) for name in ("index_q", "index_cache", "weights", "context_lens", "block_table")]
        if not reuse_ids:
            pages = (kv_block_table, pool.shape[1])
            if candidates == "use":
                self.select_inside(plan, index, *pages)
            else:
                self.select(plan, index, *pages, candidates == "choose")
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

    def choose(self, plan, index, limits, unscored, kv_table, page_size):
        level, next_n = plan.candidates, index[0].shape[1]
        of_blocks, counts = block_scores_reference(plan.scores.float(), limits, BLOCK)
        if self.defect == "lets the newest block go":
            newest = torch.arange(of_blocks.shape[1]) == counts[:, None] - 1
            of_blocks.masked_fill_(newest, -1e30)
        written = (torch.arange(of_blocks.shape[1]) < counts[:, None]) & (limits > unscored)[:, None]
        level.block_scores[written] = of_blocks[written].to(plan.scores.dtype)
        level.block_counts.copy_(counts)
        blocks, _ = topk_reference(of_blocks, level.blocks.shape[1], lengths=counts)
        if self.defect == "chooses the first blocks":
            blocks = torch.arange(blocks.shape[1]).masked_fill(blocks < 0, -1)
        if self.defect == "gives blocks in another order":
            blocks = blocks.flip(1)
        level.blocks.copy_(blocks)
        table = index[4] if kv_table is None else kv_table
        rows = torch.arange(len(limits)) // next_n
        pages = page_size // BLOCK
        level.pages.copy_(translate_reference(blocks, page_table=table, page_size=pages, table_of_row=rows))

    def select_inside(self, plan, index, kv_table, page_size):
        level, record = plan.candidates, index_format("fp8")
        blocks = level.blocks.long()
        most = None if self.defect == "sees keys behind max_seq_len" else plan.scores.shape[1]
        inside = candidates_reference(*index, blocks, record, BLOCK, max_seq_len=most)
        if self.defect == "takes a key that is not seen":
            inside = inside.masked_fill(inside == -torch.inf, -1e3)
        if self.defect == "leaves a slot unwritten":
            inside[:, :BLOCK] = -torch.inf
        level.compact.copy_(inside)
        if self.defect == "selects among all keys in later layers":
            kept = plan.scores.clone()
            self.select(plan, index, kv_table, page_size)
            plan.scores.copy_(kept)
            return
        columns, counts = topk_reference(level.compact, plan.k, drop_neg_inf=True)
        ids = translate_reference(columns, page_table=level.pages.long(), page_size=BLOCK)
        if self.defect == "takes pages of blocks for blocks":
            ids = translate_reference(columns, page_table=blocks, page_size=BLOCK)
        plan.ids.view(-1, plan.k).copy_(ids)
        plan.counts.view(-1).copy_(counts)

    def select(self, plan, index, kv_table, page_size, chooses=False):
        k, width = plan.k, plan.scores.shape[1]
        index_q, cache, _, lens, table = index
        if self.defect == "takes one length for all tokens" and lens.dim() == 1:
            lens = lens[:, None].expand(-1, index_q.shape[1])
            index[3] = lens
        record = index_format("fp8")
        most = min(k, BLOCK * plan.candidates.blocks.shape[1]) if chooses else k
        most = 0 if self.defect == "scores all" else most
        scores, scored = logits_reference(*index, record, width, unscored_up_to=most)
        plan.scores[scored] = scores[scored].to(plan.scores.dtype)
        lengths = limits_reference(lens, *index_q.shape[:2], width).flatten()
        if chooses:
            self.choose(plan, index, lengths, most, kv_table, page_size)
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


def choosing_cases(*names):
    wanted = {f"step.candidates.{name}" for name in names}
    found = [case for case in step_cases("quick", with_candidates=True) if case.name in wanted]
    assert len(found) == len(wanted)
    return found


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_a_right_chain_with_candidate_blocks_passes(scores):
    cases = choosing_cases(
        "lengths.edges", "lengths.beyond.width203", "contents.normal", "page.5.kv24", "blocks1", "layers"
    )
    results = results_of({**CHOOSING, "scores": scores}, cases)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize(
    ("defect", "name", "complaint"),
    [
        ("lets the newest block go", "blocks1", "block_scores.*is not the largest"),
        ("chooses the first blocks", "blocks5", r"candidates\.blocks"),
        ("gives blocks in another order", "blocks5", r"candidates\.blocks"),
        ("selects among all keys in later layers", "lengths.whole", "ids as a set"),
        ("takes a key that is not seen", "lengths.edges", "keys that are seen in candidate blocks"),
        ("sees keys behind max_seq_len", "lengths.beyond.width203", "keys that are seen in candidate blocks"),
        ("leaves a slot unwritten", "blocks5", "keys that are seen in candidate blocks"),
        ("takes pages of blocks for blocks", "page.64.kv8", "ids as a set"),
        ("forgets what was selected", "layers", "layer 1"),
        ("attends to one token less", "k1", "layer 0"),
    ],
)
def test_a_wrong_chain_with_candidate_blocks_fails(defect, name, complaint):
    (result,) = results_of(CHOOSING, choosing_cases(name), defect)
    assert result.status == "failed"
    assert re.search(complaint, result.problem), result.problem


def test_a_graph_is_replayed_with_other_contents_in_every_layer():
    """On a stand-in for a graph, which runs the step again."""
    (case,) = choosing_cases("graph")
    model = ModelStep(load_spec(CHOOSING))

    def capture(call, device):
        call()
        return call

    run = StepRun(case, lambda _: model, CPU, 3, capture)
    first, other = run.inputs(model), run.inputs(model, 1)
    assert [layer.index is None for layer in first.layers] == [False, True, False, True]
    run.run()
    assert model.calls == 4 * len(case.layers)
    first.copy_from(other)
    pairs = [(mine.index, theirs.index) for mine, theirs in zip(first.layers, other.layers, strict=True) if mine.index]
    for mine, theirs in pairs:
        for got, want in zip(mine.tensors, theirs.tensors, strict=True):
            assert got.view(torch.uint8).equal(want.view(torch.uint8))


def test_layers_whose_scores_nobody_keeps_are_no_case():
    for wrong in (
        {"layers": (Selects.AGAIN,)},
        {"layers": (Selects.CHOOSE,)},
        {"candidate_blocks": 3},
        {"layers": (*EVERY_KIND,), "candidate_blocks": 3, "contents": Contents.NORMAL},
    ):
        with pytest.raises(AssertionError):
            StepCase("", **wrong)


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
    for name, chooses, counts in (
        ("v32_decode_h16", False, False), ("v41_decode_h16", True, False), ("v32_decode_histogram_h16", False, True)
    ):  # fmt: skip
        more = {"with_candidates": chooses, "with_counts": counts}
        shipped, full = load_spec(name), step_cases("full", **more)
        names = {case.name for case in full}
        quick = {case.name for case in step_cases("quick", **more)}
        assert quick < names <= {case.name for case in cases_of(shipped, "sm_90a", "full")}
        assert any(name.startswith("step.candidates.") for name in quick) == chooses
        assert any(name.startswith("step.counted.") for name in quick) == counts
        refused = {case.name for case in full if too_large(shipped, case)}
        assert refused and all(".large." in name for name in refused)


def test_kernels_that_only_steps_launch_have_their_evidence_from_steps():
    plans = expand(load_spec("v32_decode_histogram_h16")).plans()
    of_steps = [plan.variant for plan in plans if launching_op(plan) == StepCase.op]
    assert all(is_dependent(variant) or variant.kernel == "counted" for variant in of_steps)
    assert {variant.kernel for variant in of_steps} == {"counted", "main", "count"}
    assert {launching_op(plan) for plan in plans if plan.variant.kernel == "select"} == {"topk"}


def test_a_case_of_the_chain_is_evidence_for_no_kernel():
    results = results_of(SPEC, [StepCase("step.small", 1, width=40, k=8)])
    report = CheckReport("mine", "quick", 1, "a device", "", results, ())
    assert report.conformant and not report.of_kernel("topk", "any").results


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_without_a_device_its_cases_count_as_not_run():
    report = run_check("v32_decode_h16", only="step.*", seed=1)
    assert report.results and report.count("not_run") == len(report.results)
