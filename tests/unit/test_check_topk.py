"""The check of top-k: its reference, its cases, that right kernels pass and wrong ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsagen.check.run import KernelCache, cases_of, run_case, run_check
from dsagen.check.topk_calls import MODES
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
from dsagen.check.topk_inputs import from_keys, make_inputs
from dsagen.check.topk_run import TopkRun, cuda_capture
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.spec import load_spec

CPU = torch.device("cpu")
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["topk"]}


class ModelTopk:
    """The op in torch on a CPU; `defect` makes it wrong in one way."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls, self.captured = spec, defect, 0, None

    def prepare(self):
        pass

    def topk_slugs(self, scores, *, k, starts=None):
        assert scores.dim() == 2 and k >= 1 and (starts is None or starts.shape == scores.shape[:1])
        return ("model",)

    def topk(self, scores, *, k, drop_neg_inf, out, raw=None, counts=None, lengths=None, starts=None, **transform):
        return self.answer(scores, k, drop_neg_inf, out, raw, counts, lengths, starts, transform)

    def answer(self, scores, k, drops, out, raw, counts, lengths, starts, transform, mode="order"):
        self.calls += 1
        assert scores.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[self.spec.scores]
        assert 1 <= k <= self.spec.selected_topk
        found, count = DEFECTS.get(self.defect, right)(self, scores, k, lengths, starts, drops)
        found = self.arranged(found, count, mode)
        if "candidate_blocks" in transform:
            transform = {"page_table": transform["candidate_blocks"], "page_size": 8}
        if self.defect == "ignores offsets":
            transform.pop("offsets", None)
        if raw is not None:
            raw.copy_(found)
        out.copy_(translate_reference(found, **transform))
        if counts is not None:
            counts.copy_(count)
        if self.defect == "leaves slots":
            out[found < 0] = -77
        if self.defect == "writes past the slots":
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).fill_(0)
        if self.defect == "is not the same each time" and self.calls % 7 == 0:
            out.copy_(out.flip(1))
        return out.clone() if self.defect == "returns another tensor" else out

    def arranged(self, found, count, mode):
        return found


class ModelWithModes(ModelTopk):
    """The op with modes: without `order` the front of each row is turned around, unless the row is taken whole."""

    def topk(
        self,
        scores,
        *,
        k,
        drop_neg_inf,
        out,
        determinism,
        raw=None,
        counts=None,
        lengths=None,
        starts=None,
        **transform,
    ):
        if determinism == "off" and self.defect == "":
            self.defect = "prefers high indices"
        try:
            return self.answer(scores, k, drop_neg_inf, out, raw, counts, lengths, starts, transform, determinism)
        finally:
            self.defect = "" if self.defect == "prefers high indices" else self.defect

    def arranged(self, found, count, mode):
        if mode == "order" and self.defect != "order is lost":
            return found
        turned = torch.where((count == found.shape[1])[:, None], found.flip(1), found)
        if self.defect == "one twice":
            turned[:, 1] = torch.where(count > 1, turned[:, 0], turned[:, 1])
        return found.flip(1) if self.defect == "-1 in front" else turned


def right(model, scores, k, lengths, starts, drops):
    return topk_reference(scores, k, lengths=lengths, starts=starts, drop_neg_inf=drops)


def prefers_high_indices(model, scores, k, lengths, starts, drops):
    """The reference on a row that is turned around; windows are turned with it."""
    rows, width = scores.shape
    first = torch.zeros(rows, dtype=torch.int64) if starts is None else starts.long()
    length = width - first if lengths is None else lengths.long().clamp(min=0)
    begin = width - first - length
    found, count = topk_reference(scores.flip(1), k, lengths=length, starts=begin, drop_neg_inf=drops)
    turned = torch.where(found >= 0, length[:, None] - 1 - found, width)
    ordered = turned.sort(1).values
    return torch.where(ordered < width, ordered, -1), count


def keeps_candidates(most):
    """Scores behind the first `most` of the threshold's bin are lost; a bin has the upper 11 bits of an fp32."""

    def select(model, scores, k, lengths, starts, drops):
        bins = scores.float().view(torch.int32) >> 21
        want, _ = right(model, scores, k, lengths, starts, drops)
        last = bins.gather(1, want[:, -1:].clamp(min=0))
        place = (bins == last).cumsum(1)
        lost = (bins == last) & (place > most)
        return right(model, scores.float().masked_fill(lost, -torch.inf), k, lengths, starts, drops)

    return select


def reads_past_the_window(model, scores, k, lengths, starts, drops):
    return right(model, scores, k, None, starts, drops)


def keeps_neg_inf(model, scores, k, lengths, starts, drops):
    return right(model, scores, k, lengths, starts, False)


def takes_nan_as_largest(model, scores, k, lengths, starts, drops):
    return right(model, scores.float().masked_fill(scores.isnan(), torch.inf), k, lengths, starts, drops)


def emits_garbage_for_nan(model, scores, k, lengths, starts, drops):
    found, count = right(model, scores, k, lengths, starts, drops)
    nan = scores.isnan().gather(1, found.clamp(min=0)) if scores.shape[1] else found < 0
    return torch.where((found >= 0) & nan, 1 << 30, found), count


def has_room_for_1024_ties(model, scores, k, lengths, starts, drops):
    found, count = right(model, scores, k, lengths, starts, drops)
    if not scores.shape[1]:
        return found, count
    values = scores.gather(1, found.clamp(min=0)).float()
    ties = (values == values.min(1, keepdim=True).values).cumsum(1)
    return torch.where(ties > 1024, -77, found), count


def picks_another_set_each_time(model, scores, k, lengths, starts, drops):
    pick = prefers_high_indices if model.calls % 2 else right
    return pick(model, scores, k, lengths, starts, drops)


def depends_on_the_batch(model, scores, k, lengths, starts, drops):
    pick = right if scores.shape[0] > 1 else prefers_high_indices
    return pick(model, scores, k, lengths, starts, drops)


def resets_by_captured_lengths(model, scores, k, lengths, starts, drops):
    """What a host decides is decided once, for the lengths that were there."""
    if model.captured is None:
        model.captured = int(lengths.max()) if lengths is not None else scores.shape[1]
    if lengths is None or int(lengths.max()) <= model.captured:
        return right(model, scores, k, lengths, starts, drops)
    return prefers_high_indices(model, -scores, k, lengths, starts, drops)


def depends_on_the_columns(model, scores, k, lengths, starts, drops):
    """Samples columns for its first guess and does not go back on it."""
    lost = torch.arange(scores.shape[1]) % 97 == 96
    return right(model, scores.float().masked_fill(lost, -torch.inf), k, lengths, starts, drops)


def skips_a_digit(model, scores, k, lengths, starts, drops):
    """Equal in the last ten bits of an fp32: 11 + 11 bits decide."""
    bits = scores.float().view(torch.int32)
    return right(model, (bits >> 10 << 10).view(torch.float32), k, lengths, starts, drops)


def reads_rows_that_are_taken_whole(model, scores, k, lengths, starts, drops):
    found, count = right(model, scores, k, lengths, starts, drops)
    value = scores.gather(1, found.clamp(min=0)) if scores.shape[1] else found
    return torch.where((found >= 0) & ~value.isnan(), found, -1), count


DEFECTS = {
    "prefers high indices": prefers_high_indices,
    "keeps 4096 candidates": keeps_candidates(4096),
    "keeps 1024 candidates": keeps_candidates(1024),
    "reads past the window": reads_past_the_window,
    "keeps -inf": keeps_neg_inf,
    "NaN is the largest": takes_nan_as_largest,
    "garbage for NaN": emits_garbage_for_nan,
    "has room for 1024 ties": has_room_for_1024_ties,
    "another set each time": picks_another_set_each_time,
    "depends on the batch": depends_on_the_batch,
    "resets by captured lengths": resets_by_captured_lengths,
    "depends on the columns": depends_on_the_columns,
    "skips a digit": skips_a_digit,
    "reads rows that are taken whole": reads_rows_that_are_taken_whole,
}


def small(case):
    """The case in rows that a CPU sorts in a moment, still longer than k and than small buffers."""
    return replace(case, rows=min(case.rows, 6), width=min(case.width, 5000))


@pytest.fixture
def few_repeats(monkeypatch):
    monkeypatch.setattr("dsagen.check.topk_run.REPEATS", 3)


def call_again(call, device):
    """A graph of which every replay calls."""
    call()
    return call


def results_of(cases, defect="", scores="fp32", model=ModelTopk, capture=cuda_capture):
    spec = load_spec({**SPEC, "scores": scores})
    kernels = KernelCache(spec, CPU, lambda s, device: model(s, defect))
    return tuple(run_case(TopkRun(case, kernels, CPU, 3, capture))[0] for case in cases)


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
    assert {c.digit for c in quick} >= {(0, 11), (11, 11), (22, 10), (0, 8), (8, 8), (16, 8), (24, 8)}
    assert {c.gap for c in quick} >= {0, 1, 5} and {c.extras for c in quick} == {True, False}
    assert any(size & (size - 1) for size in {c.page_size for c in quick})
    assert {c.rows for c in full} >= {1, 2, 132, 4096, 70_000} and any(c.far_out for c in full)
    assert {(c.rows, c.k) for c in full if "peer" in c.name} >= {
        (r, k) for r in (1, 32) for k in (512, 1024, 2048, 3000)
    }
    assert any(c.rows > 65535 for c in full) and any(c.width >= 1 << 22 for c in full) and any(c.far for c in full)
    assert FAR_ROW_ELEMENTS > 2**32 and max(c.k for c in quick) == MOST_SLOTS
    assert set(quick) < set(full)
    assert len({c.name for c in full}) == len(full) and all(c.name.startswith("topk.") for c in full)


def cpu_cases(modes=("order",)):
    return [small(case) for case in topk_cases("quick", modes)]


@pytest.mark.usefixtures("few_repeats")
@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_a_right_implementation_passes(scores):
    cases = cpu_cases()
    results = results_of(cases, scores=scores, capture=call_again)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) > 200 and {r.op for r in results} == {"topk"}


@pytest.mark.usefixtures("few_repeats")
def test_a_right_implementation_passes_in_every_mode():
    cases = [case for case in cpu_cases(MODES) if case.mode != "order"]
    results = results_of(cases, model=ModelWithModes, capture=call_again)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert {case.mode for case in cases} == {"off", "set"} and len(results) > 100


def test_weaker_modes_are_asked_for_where_they_are_offered():
    assert {case.mode for case in topk_cases("full")} == {"order"}
    assert {case.mode for case in topk_cases("full", MODES)} == set(MODES)
    assert all(case.name.endswith(f".{case.mode}") for case in topk_cases("full", MODES) if case.mode != "order")


TIED = TopkCase("topk.x", 3, 900, 64, Scores.TWO_VALUES)


@pytest.mark.parametrize(
    ("mode", "defect", "case", "problem"),
    [
        ("order", "order is lost", TIED, "raw[0, 0] = "),
        ("set", "prefers high indices", TIED, "raw as a set[0, "),
        ("set", "one twice", TIED, "raw as a set[0, "),
        ("off", "one twice", TIED, "raw has an index twice"),
        ("off", "skips a digit", replace(TIED, scores=Scores.LOW_10_BITS), "raw[0] does not select the scores"),
        ("off", "NaN is the largest", replace(TIED, scores=Scores.SOME_NAN), "raw[0] does not select the NaN"),
        ("off", "-1 in front", replace(TIED, windows=Windows.LENGTHS), "raw behind the count[2, "),
    ],
)
def test_a_broken_promise_fails(mode, defect, case, problem):
    case = replace(case, mode=mode)
    (passed,) = results_of([case], model=ModelWithModes)
    assert passed.status == "passed", passed.problem
    (result,) = results_of([case], defect, model=ModelWithModes)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


WINDOWED = TopkCase("topk.small", 9, 6000, 100, windows=Windows.LENGTHS)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("prefers high indices", TopkCase("topk.x", 3, 900, 64, Scores.TWO_VALUES), "raw[0, "),
        ("keeps 4096 candidates", TopkCase("topk.x", 3, 9000, 64, Scores.LOW_10_BITS), "raw[0, "),
        ("skips a digit", TopkCase("topk.x", 3, 9000, 64, Scores.ONE_DIGIT, digit=(22, 10)), "raw[0, "),
        ("NaN is the largest", TopkCase("topk.x", 3, 900, 64, Scores.SOME_NAN), "raw[0, "),
        ("depends on the columns", TopkCase("topk.x", 3, 900, 64, probe=Probe.PERMUTED), "raw[0, "),
        ("depends on the batch", TopkCase("topk.x", 3, 900, 64, Scores.TWO_VALUES, probe=Probe.ALONE), "rows 0..0 in "),
        ("reads rows that are taken whole", TopkCase("topk.x", 3, 900, 64, windows=Windows.SHORT), "raw[0, 0] = -1 "),
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


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16)])
@pytest.mark.parametrize(("above", "count"), [(0, 11), (11, 11), (22, 10), (8, 8)])
def test_digits_vary_alone_or_not_at_all(dtype, bits, above, count):
    generator = torch.Generator().manual_seed(1)
    case = TopkCase("topk.x", 2, 9000, 64, Scores.ONE_DIGIT, digit=(above, count))
    masks = []
    for scores in (Scores.ONE_DIGIT, Scores.OTHER_DIGITS):
        found = make_inputs(replace(case, scores=scores), dtype, CPU, generator).scores.contiguous()
        words = found.view(torch.int32 if bits == 32 else torch.int16).long() & ((1 << bits) - 1)
        keys = torch.where(words >> (bits - 1) == 1, (1 << bits) - 1 - words, words + (1 << (bits - 1)))
        # A NaN need not keep its bits.
        kept = keys[~found.isnan()]
        masks.append(_varying(kept))
    digit = sum(1 << bit for bit in range(max(bits - above - count, 0), max(bits - above, 0)))
    assert masks == [digit, ((1 << bits) - 1) ^ digit]


def _varying(keys):
    mask = 0
    for bit in range(32):
        mask |= int(((keys >> bit & 1) != (keys[0] >> bit & 1)).any()) << bit
    return mask


def test_keys_are_in_the_order_of_scores():
    keys = torch.tensor([0x00800000, 0x407FFFFF, 0x7FFFFFFF, 0x80000000, 0xBF800000, 0xFF7FFFFF])
    scores = from_keys(keys, 32)
    assert torch.equal(scores.sort().values, scores) and scores[4] == 1.0 and scores[3] == 0.0
    assert from_keys(torch.tensor([0xBF80]), 16).item() == 1.0


def test_nothing_outside_of_the_windows_is_a_number():
    case = TopkCase("topk.x", 9, 300, 64, windows=Windows.BOTH, misaligned=3)
    inputs = make_inputs(case, torch.float32, CPU, torch.Generator().manual_seed(1))
    column = torch.arange(300)
    first, last = inputs.windows["starts"][:, None], (inputs.windows["starts"] + inputs.windows["lengths"])[:, None]
    inside = (column >= first) & (column < last)
    assert torch.equal(inputs.scores.isfinite(), inside)
    assert inputs.scores.storage_offset() == 3 and inputs.scores.stride(0) == 305


def test_graphs_do_not_run_without_a_device():
    (result,) = results_of([case for case in topk_cases("quick") if case.name == "topk.graph.logical"])
    assert (result.status, result.problem) == ("not_run", "needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_spec_is_checked_op_by_op():
    report = run_check(load_spec({**SPEC, "ops": ["topk", "sparse_decode"]}), seed=1)
    assert [r.status for r in report.host_results] == ["passed"] * 4
    assert {r.op for r in report.results} == {"topk", "sparse_decode"}
    assert report.of_op("topk").count("not_run") == len(topk_cases("quick", MODES))
    alone = run_check(load_spec(SPEC), "full", seed=1)
    assert [r.name for r in alone.host_results] == [
        "host.every cell renders",
        "host.selections are those of sorted lists",
    ]
    # Every mode; k 2048 without what is dropped is run in the weaker ones too.
    assert len(cases_of(load_spec(SPEC), "sm_90a", "quick", "topk.data.*")) == (2 * 3 + 2) * (len(Scores) - 2)
