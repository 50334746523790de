"""The check of the indexer's logits: a right implementation passes every case, each wrong one fails, on the CPU."""

from __future__ import annotations

import pytest
import torch

from dsagen.check.indexer_cases import (
    FAR_PAD_BYTES,
    HEADS,
    PAGE_SIZES,
    Contents,
    Lengths,
    LogitsCase,
    Probe,
    logits_cases,
)
from dsagen.check.indexer_inputs import make_inputs
from dsagen.check.indexer_run import LogitsRun
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.families.indexer_logits.reference import limits_reference, logits_reference
from dsagen.index_format import index_format
from dsagen.spec import load_spec

CPU = torch.device("cpu")
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": {"heads": 16}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModelIndexer:
    """The op by its reference, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def indexer_logits(
        self, q, k_cache, weights, context_lens, block_table, *, out, unscored_up_to, fill_neg_inf, q_scales=None
    ):
        batch, next_n = q.shape[:2]
        self.calls += 1
        width = out.shape[1]
        if self.defect == "drops signs of weights":
            weights = weights.abs()
        if self.defect == "takes one length for all tokens" and context_lens.dim() == 1:
            context_lens = context_lens[:, None].expand(batch, next_n)
        if self.defect == "assumes pages without padding":
            size, _, columns = k_cache.shape[1:]
            k_cache = k_cache.as_strided(k_cache.shape, (size * columns, columns, columns, 1))
        if self.defect == "assumes lengths without strides":
            context_lens = context_lens.as_strided(context_lens.shape, (next_n, 1)[: context_lens.dim()])
        skipped = 0 if self.defect == "scores every row" else unscored_up_to
        given = (q, k_cache, weights, context_lens, block_table)
        if self.defect == "takes q's scales for ones" and q_scales is not None:
            q_scales = torch.full_like(q_scales, 0x7F7F7F7F)
        record = index_format(self.spec.index.keys)
        scores, scored = logits_reference(*given, record, width, q_scales=q_scales, unscored_up_to=skipped)
        if self.defect == "takes NaN for zero":
            scores = scores.nan_to_num(0.0, torch.inf, -torch.inf)
        if self.defect == "keeps 8 bits":
            scores = scores.float().view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32).double()
        if self.defect == "keeps few bits":
            scores = scores.float().view(torch.int32).bitwise_and(-(1 << 10)).view(torch.float32).double()
        if self.defect == "differs among others" and batch > 1:
            scores = scores * (1 + 2.0**-22)
        if self.defect == "differs each time" and self.calls > 1:
            scores = scores * (1 + 2.0**-22)
        if self.defect == "gives pages that there are not zeros":
            scores = torch.where(scored & (scores == -torch.inf), 0.0, scores)
        limits = limits_reference(context_lens, batch, next_n, min(width, block_table.shape[1] * k_cache.shape[1]))
        behind = torch.arange(width) >= limits.flatten()[:, None]
        if self.defect == "scores past the window":
            scored = scored | (torch.arange(width) == limits.flatten()[:, None])
        out[scored] = scores[scored].to(out.dtype)
        if fill_neg_inf and self.defect != "does not fill":
            out.masked_fill_(behind, -torch.inf)
        if self.defect == "writes past the row":
            last = out[-1]
            last.as_strided((1,), (1,), last.storage_offset() + width).fill_(0)
        return out.clone() if self.defect == "returns another tensor" else out


def results_of(cases, defect="", **changes):
    spec = load_spec({**SPEC, **changes})
    return run_cases(cases, KernelCache(spec, CPU, lambda s, device: ModelIndexer(s, defect)), CPU, seed=3)


def cpu_cases():
    # Those of many requests and long rows are the same again, and slow where this runs.
    cases = [case for case in logits_cases("quick", True) if case.probe is not Probe.GRAPH]
    return [case for case in cases if case.batch < 100 and case.width < 2000]


@pytest.mark.parametrize("scores", DTYPES)
def test_a_right_implementation_passes(scores):
    results = results_of(cpu_cases(), scores=scores)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) >= 60 and {r.op for r in results} == {"indexer_logits"}


@pytest.mark.parametrize("dim", [32, 64])
def test_keys_of_other_widths(dim):
    cases = [case for case in cpu_cases() if "contents" in case.name or "page61" in case.name]
    assert {r.status for r in results_of(cases, index={"heads": 8, "dim": dim})} == {"passed"}


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("keys", ["mxfp8", "mxfp4"])
def test_keys_with_scales_of_blocks(keys, dim):
    cases = [case for case in cpu_cases() if "contents" in case.name or "page61.pad4" in case.name]
    cases = [case for case in cases if keys == "mxfp8" or case.contents is not Contents.NAN_KEYS]
    changes = {"index": {"heads": 8, "dim": dim, "keys": keys}}
    assert {r.status for r in results_of(cases, **changes)} == {"passed"}
    (result,) = results_of(cases[:1], "takes q's scales for ones", **changes)
    assert result.status == "failed" and result.problem.startswith("scores: scores[")


def test_the_lists_are_complete():
    quick, full = logits_cases("quick", True), logits_cases("full", True)
    assert set(quick) < set(full) and len({case.name for case in full}) == len(full)
    assert {c.contents for c in quick} == set(Contents) and {c.lengths for c in quick} == set(Lengths)
    assert {c.probe for c in quick} == set(Probe) and {c.next_n for c in quick} == set(range(1, 9))
    assert {c.page_size for c in quick} == set(PAGE_SIZES) and {c.heads for c in quick} == {*HEADS, None}
    assert any(c.pad_bytes == FAR_PAD_BYTES and c.batch * c.width // c.page_size * c.pad_bytes > 2**31 for c in full)
    assert {c.contents for c in logits_cases("quick", False)} == set(Contents) - {Contents.NAN_KEYS}
    assert not any("nan_keys" in c.name for c in cases_of(load_spec({**SPEC, "archs": ["sm_80"]}), "sm_80", "quick"))


PLAIN = LogitsCase("logits.x", next_n=2)
PADDED = LogitsCase("logits.x", pad_bytes=64)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("drops signs of weights", PLAIN, "scores: scores["),
        (
            "takes one length for all tokens",
            LogitsCase("logits.x", next_n=3, lengths=Lengths.PER_REQUEST),
            "columns that",
        ),
        ("assumes pages without padding", PADDED, "scores: scores["),
        ("assumes lengths without strides", LogitsCase("logits.x", next_n=2, lengths=Lengths.STRIDED), "columns that"),
        ("scores every row", LogitsCase("logits.x", 6, 2, unscored=150), "columns that nothing should write"),
        ("takes NaN for zero", LogitsCase("logits.x", contents=Contents.NAN_KEYS), "scores: scores["),
        ("keeps few bits", LogitsCase("logits.x", contents=Contents.NORMAL), "scores: scores["),
        ("keeps few bits", LogitsCase("logits.x", contents=Contents.LARGE), "scores: scores["),
        ("keeps 8 bits", LogitsCase("logits.x", contents=Contents.NORMAL, short_sums=True), "scores: scores["),
        ("differs among others", LogitsCase("logits.x", contents=Contents.NORMAL, probe=Probe.ALONE), "request 0 by"),
        ("differs each time", LogitsCase("logits.x", contents=Contents.NORMAL, probe=Probe.REPEATED), "run 2: scores["),
        ("gives pages that there are not zeros", LogitsCase("logits.x", page_size=5, wild=True), "scores: scores["),
        ("scores past the window", PLAIN, "columns that nothing should write: scores["),
        ("does not fill", LogitsCase("logits.x", fill=True), "columns outside of the window: scores["),
        ("writes past the row", PLAIN, "1 elements outside of the scores were written"),
        ("returns another tensor", PLAIN, "the op did not return the output that it was given"),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


@pytest.mark.parametrize("contents", [Contents.NORMAL, Contents.LARGE])
def test_short_sums_may_have_13_bits_where_they_are_declared(contents):
    case = LogitsCase("logits.x", contents=contents, short_sums=True)
    assert [r.problem for r in results_of([case], "keeps few bits")] == [""]


def test_graphs_do_not_run_without_a_device_and_replay_other_contents():
    (case,) = [case for case in logits_cases("quick", True) if case.probe is Probe.GRAPH]
    (result,) = results_of([case])
    assert (result.status, result.problem) == ("not_run", "needs a CUDA device")
    kernels = ModelIndexer(load_spec(SPEC))
    run = LogitsRun(case, lambda _: kernels, CPU, 3)
    inputs, other = run.inputs(kernels), run.inputs(kernels, 1)
    assert not any(a.equal(b) for a, b in zip(inputs.tensors[2:], other.tensors[2:], strict=True))
    inputs.copy_from(other)
    outputs = run.outputs(kernels)
    run.call(kernels, inputs, outputs.view)
    run.compare(kernels, inputs, outputs)


def test_what_no_token_sees_is_nan():
    case = LogitsCase("logits.x", 2, 2, 100, 16, lengths=Lengths.PER_TOKEN)
    spec = load_spec(SPEC)
    inputs = make_inputs(case, index_format("fp8"), spec.index, torch.Generator().manual_seed(1))
    pool = torch.empty(0, dtype=torch.uint8).set_(inputs.k_cache.untyped_storage())
    poison = int((pool & 0x7F == 0x7F).sum())
    seen = int(limits_reference(inputs.context_lens, 2, 2, 100).amax(1).sum())
    assert poison >= pool.numel() - seen * 132


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_requests_of_fewer_pages_than_are_skipped_have_no_wild_ones():
    case, index = LogitsCase("logits.x", 3, 1, 3, page_size=5, lengths=Lengths.WHOLE, wild=True), load_spec(SPEC).index
    table = make_inputs(case, index_format("fp8"), index, torch.Generator().manual_seed(1)).block_table[:, 0]
    assert table[0] == -1 and int(table[1:].min()) >= 0 and int(table.max()) < 9


def test_a_spec_of_both_ops_is_checked_op_by_op():
    report = run_check(load_spec({**SPEC, "ops": ["topk", "indexer_logits"], "scores": "bf16"}), seed=1)
    assert report.of_op("indexer_logits").count("not_run") == len(logits_cases("quick", True))
    loaded = []
    spec = load_spec({**SPEC, "ops": ["topk", "indexer_logits"]})
    kernels = KernelCache(spec, CPU, lambda s, device: loaded.append(s) or ModelIndexer(s))
    kernels(PLAIN), kernels(LogitsCase("logits.x", heads=72)), kernels(PLAIN)
    assert [(s.ops, s.index.heads) for s in loaded] == [(("indexer_logits",), 16), (("indexer_logits",), 72)]
