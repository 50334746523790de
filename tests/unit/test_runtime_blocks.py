"""Scores of candidate blocks through the runtime: argument blocks, results, and every argument that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.check.block_cases import BlockCase, block_cases
from dsagen.check.indexer_cases import Contents, Lengths, LogitsCase
from dsagen.check.run import KernelCache, cases_of, run_cases
from dsagen.errors import GuardError
from dsagen.families.indexer_logits.reference import block_scores_reference, limits_reference, logits_reference
from dsagen.index_format import index_format
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

BATCH, NEXT_N, ROWS, WIDTH = 2, 3, 6, 100
INDEX = {"heads": 24, "forms": ["paged", "blocks"]}
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"], "index": INDEX}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(**changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=200))
    return driver, Kernels(load_spec({**SPEC, **changes}), open_driver=lambda: driver, read=fake_cubins)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def tensors(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.zeros(BATCH, NEXT_N, 24, 128, dtype=torch.uint8),
        "k_cache": torch.zeros(9, 61, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(ROWS, 24),
        "context_lens": ints(BATCH, NEXT_N),
        "block_table": ints(BATCH, 4),
    }
    return {**given, **changes}


def test_block_of_a_call():
    driver, kernels = make()
    out, scores, counts = kernels.indexer_logits_blocks(**tensors(), max_seq_len=WIDTH, unscored_up_to=7)
    assert (out.shape, scores.shape, counts.shape) == ((ROWS, WIDTH), (ROWS, 13), (ROWS,))
    assert (scores.dtype, counts.dtype, scores.stride()) == (torch.float32, torch.int32, (16, 1))
    (record,), (plan,) = driver.launches, kernels._on(0).by_role["indexer_logits", "blocks"]
    block = unpack(record.block, plan)
    assert record.symbol == plan.symbol
    assert (block["scores"], block["width"], block["unscored"], block["fills"]) == (out.data_ptr(), WIDTH, 7, 0)
    assert (block["block_scores"], block["block_stride"]) == (scores.data_ptr(), 16)
    assert (block["block_counts"], block["unit_tokens"], block["most_keys"]) == (counts.data_ptr(), 3, WIDTH)
    wide = torch.zeros(ROWS, 40)[:, :13]
    given = {"out": torch.zeros(ROWS, WIDTH), "block_scores": wide, "block_counts": ints(ROWS)}
    found = kernels.indexer_logits_blocks(**tensors(), **given)
    assert all(mine is theirs for mine, theirs in zip(found, given.values(), strict=True))
    assert unpack(driver.launches[-1].block, plan)["block_stride"] == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": None}, r"\[T-21\] max_seq_len: missing"),
        ({"block_scores": torch.zeros(ROWS, 12)}, r"\[T-06\] block_scores: shape \(6, 12\), expected"),
        ({"block_scores": torch.zeros(ROWS, 13).bfloat16()}, r"\[T-04\] block_scores: dtype bfloat16"),
        ({"block_scores": [1]}, r"\[T-01\] block_scores: expected a torch.Tensor, found list"),
        ({"block_counts": ints(ROWS, 1)}, r"\[T-05\] block_counts: 2 dims"),
        ({"block_counts": ints(ROWS).long()}, r"\[T-04\] block_counts: dtype int64"),
        ({"q": torch.zeros(BATCH, NEXT_N, 24, 128)}, r"\[T-04\] q: dtype float32"),
        ({"fill_neg_inf": 1}, r"\[T-12\] fill_neg_inf"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    driver, kernels = make()
    with pytest.raises(GuardError, match=f"^{message}"):
        kernels.indexer_logits_blocks(**{**tensors(), "max_seq_len": WIDTH, **changes})
    assert not driver.launches


def test_results_must_lie_apart_and_the_form_be_declared():
    _, kernels = make()
    memory = torch.zeros(ROWS, 13)
    for given in (
        {"block_scores": memory, "block_counts": memory.view(torch.int32).flatten()[:ROWS]},
        {"out": memory.view(-1)[: ROWS * 8].view(ROWS, 8), "block_scores": memory[:, :1]},
    ):
        with pytest.raises(GuardError, match=r"^\[T-08\]"):
            kernels.indexer_logits_blocks(**tensors(), **given, max_seq_len=8 if "out" in given else WIDTH)
    _, plain = make(index={"heads": 24})
    with pytest.raises(GuardError, match=r"^\[T-11\] indexer_logits_blocks: .* declares index.forms paged: add blocks"):
        plain.indexer_logits_blocks(**tensors(), max_seq_len=WIDTH)


# ---- the check of it


class ModelBlocks:
    """The op by its reference, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect = spec, defect

    def prepare(self):
        pass

    def logits_slugs(self, form):
        return (f"{form} kernel",)

    def indexer_logits_blocks(
        self, *index, out, block_scores, block_counts, unscored_up_to, fill_neg_inf, q_scales=None
    ):
        record = index_format(self.spec.index.keys)
        scores, scored = logits_reference(*index, record, out.shape[1], unscored_up_to=unscored_up_to)
        out[scored] = scores[scored].to(out.dtype)
        batch, next_n = index[0].shape[:2]
        most = min(out.shape[1], index[4].shape[1] * index[1].shape[1])
        limits = limits_reference(index[3], batch, next_n, most).flatten()
        if fill_neg_inf:
            out[torch.arange(out.shape[1]) >= limits[:, None]] = -torch.inf
        of_blocks, counts = block_scores_reference(out.double(), limits, 8)
        if self.defect == "pins no block":
            of_blocks = of_blocks.masked_fill(of_blocks.isposinf(), 0.0)
        if self.defect == "loses NaN":
            of_blocks = of_blocks.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
        seen = counts if self.defect == "scores blocks of all" else torch.where(limits <= unscored_up_to, 0, counts)
        inside = torch.arange(of_blocks.shape[1]) < seen[:, None]
        block_scores[inside] = of_blocks[inside].to(block_scores.dtype)
        block_counts.copy_(counts + (self.defect == "counts one more"))
        if self.defect == "writes past its output":
            block_scores.as_strided((1,), (1,), block_scores.storage_offset() + block_scores.numel()).zero_()
        return (out, block_scores.clone() if self.defect == "returns another tensor" else block_scores, block_counts)


def results_of(cases, defect=""):
    spec, cpu = load_spec({**SPEC, "index": {"heads": 16, "forms": ["blocks"]}}), torch.device("cpu")
    return run_cases(cases, KernelCache(spec, cpu, lambda s, device: ModelBlocks(s, defect)), cpu, seed=3)


def test_a_right_implementation_passes_the_check():
    few = ("contents", "length.unscored", "length.beyond", "place.strided", "place.wild")
    cases = [case for case in block_cases("quick", True) if any(name in case.name for name in few)]
    assert [(r.name, r.problem) for r in results_of(cases) if r.status != "passed"] == []
    quick, full = block_cases("quick", True), block_cases("full", True)
    assert set(quick) < set(full) and len({case.name for case in full}) == len(full)
    assert {c.call.contents for c in quick} == set(Contents) and {c.call.lengths for c in quick} == set(Lengths)
    names = {case.name.split(".")[0] for case in cases_of(load_spec(SPEC), "sm_90a", "quick")}
    assert names == {"logits", "blocks"}


SPECIAL = BlockCase("blocks.x", LogitsCase("", 3, 2, contents=Contents.SPECIAL))
UNSCORED = BlockCase("blocks.x", LogitsCase("", 9, 2, 189, unscored=64))


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("pins no block", SPECIAL, "block_scores: scores["),
        ("loses NaN", SPECIAL, "block_scores: scores["),
        ("scores blocks of all", UNSCORED, "block_scores that nothing should write"),
        ("counts one more", SPECIAL, "block_counts: scores["),
        ("writes past its output", SPECIAL, "1 elements outside of the blocks' outputs"),
        ("returns another tensor", SPECIAL, "the op did not return the outputs"),
    ],
)
def test_a_wrong_implementation_fails_the_check(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem
