"""The benchmark of top-k on a CPU: cases, goals, verification, peers with stand-ins for their libraries, the sweep."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.arch import H200
from dsagen.bench import run, sweep, topk_run
from dsagen.bench.cases import topk_cases
from dsagen.bench.figures import PeerFigure, case_key
from dsagen.bench.timing import Timing, input_sets_for
from dsagen.bench.topk_data import TopkBenchCase, logical_ids, topk_inputs
from dsagen.bench.topk_figures import GOAL_DEVICE, GOALS_US, TopkFigures, topk_floor_us
from dsagen.bench.topk_peers import TOPK_PEERS
from dsagen.bench.topk_verify import promise_problem, selection_problem
from dsagen.check.topk_calls import MODES, offered_modes, topk_calls
from dsagen.errors import CheckFailed, SpecError
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.matrix import expand
from dsagen.spec import load_spec

SPEC = load_spec("v32_topk_h128")
CASE = TopkBenchCase("fp32", 128, 32768, 2048, "set")
SMALL = TopkBenchCase("fp32", 5, 512, 32, "order", page_size=16)
FIGURES = TopkFigures("v32_topk_h128", ("s",), GOAL_DEVICE, "sm_90a", 15.0, 0.01, 16, 9.0, 15.5, 3.7, CASE)


# ---- cases and figures


def test_the_cases_hold_every_goal():
    cases = [case for score in ("fp32", "bf16") for case in topk_cases(SPEC, score, MODES)]
    shapes = {(case.score, case.rows, case.width, case.k) for case in cases}
    assert set(GOALS_US) <= shapes
    assert {case.mode for case in cases if case.k == 2048} == set(MODES)
    assert {case.mode for case in cases if case.k < 2048} == {"set"}
    assert {case.k for case in cases} == {512, 1024, 2048}
    assert len(set(cases)) == len(cases)


def test_the_cases_follow_the_capacity_and_the_modes():
    narrow = SPEC.replace(topk=512)
    assert {(case.k, case.mode) for case in topk_cases(narrow, "fp32", ("order",))} == {(512, "order")}
    assert {case.mode for case in topk_cases(SPEC, "bf16", ("order",))} == {"order"}


def test_sets_leave_the_cache_or_are_24():
    for case in topk_cases(SPEC, "fp32", MODES):
        sets = input_sets_for(case.read_bytes + case.write_bytes, most=topk_run.MOST_SETS)
        assert 2 <= sets <= 24
        assert sets == 24 or sets * (case.read_bytes + case.write_bytes) >= 256 << 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"score": "fp16"}, "score 'fp16'"),
        ({"mode": "sorted"}, "mode 'sorted'"),
        ({"k": 0}, "k must be at least 1"),
        ({"k": 40_000}, "k 40000 > width 32768"),
        ({"page_size": 48}, "does not fill pages of 48"),
    ],
)
def test_a_case_that_cannot_be_drawn_is_refused(change, text):
    with pytest.raises(SpecError, match=text):
        replace(CASE, **change)


def test_the_floor_is_one_read():
    assert topk_floor_us(CASE, H200) == pytest.approx(128 * 32768 * 4 / 4530e9 * 1e6)


def test_goals_are_for_their_device_and_shape():
    assert FIGURES.goal_us == 16.0 and FIGURES.missed == ()
    assert replace(FIGURES, case=replace(CASE, mode="order")).goal_us == pytest.approx(16.0 * 1.3)
    assert replace(FIGURES, device="NVIDIA H100 80GB HBM3").goal_us is None
    assert replace(FIGURES, case=replace(CASE, k=512)).goal_us is None
    late = replace(FIGURES, gpu_us=17.0, off_us=14.0)
    assert late.missed == ("17.0 us, goal 16.0 us", "1.21 x off, goal 1.15 x")
    assert replace(FIGURES, off_us=13.5).missed == ()


def test_figures_are_plain_data_and_a_row():
    document = json.loads(json.dumps(FIGURES.to_json(), allow_nan=False))
    assert document["goal_us"] == 16.0 and document["case"]["mode"] == "set"
    assert len(FIGURES.cells()) == len(FIGURES.header)
    assert FIGURES.title == "fp32 128 x 32768, k 2048, set"
    assert replace(FIGURES, record_us=13.0).slower and not FIGURES.slower


def test_figures_know_their_kernels():
    assert FIGURES.measured_spec(SPEC) is SPEC
    bf16 = replace(FIGURES, case=replace(CASE, score="bf16"))
    plans = expand(bf16.measured_spec(SPEC)).plans()
    assert all("bf16" in plan.slug for plan in plans)
    ran = replace(bf16, slugs=tuple(plan.slug for plan in plans[3:]))
    assert [ran.took_part(plan) for plan in plans] == [False] * 3 + [True] * (len(plans) - 3)
    assert not any(bf16.took_part(plan) for plan in plans)


# ---- inputs and verification


def selection(case, item):
    indices, _ = topk_reference(item.scores, case.k)
    return indices, translate_reference(indices, page_table=item.page_table, page_size=case.page_size)


def test_paged_ids_are_read_back():
    first, second = topk_inputs(SMALL, 2, device="cpu")
    indices, ids = selection(SMALL, first)
    assert torch.equal(logical_ids(SMALL, first, ids), indices)
    assert not torch.equal(ids, indices) and not torch.equal(first.scores, second.scores)
    assert logical_ids(SMALL, first, torch.tensor([[-1, SMALL.width, -77]])).tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ids: ids[:, :-1], "has shape (5, 31), expected (5, 32)"),
        (lambda ids: ids.clone().index_fill_(1, torch.tensor([3]), -1), "slot 3 of row 0 is no index: -1; 5 slots"),
        (lambda ids: ids.clone().index_fill_(1, torch.tensor([3]), 512), "slot 3 of row 0 is no index: 512"),
        (lambda ids: torch.cat([ids[:, :-1], ids[:, :1]], 1), "twice"),
        (lambda ids: torch.cat([ids[:, :-1], 511 - ids[:, -1:]], 1), "does not hold torch.topk's values"),
    ],
)
def test_a_wrong_selection_is_found(change, text):
    (item,) = topk_inputs(SMALL, 1, device="cpu")
    item = replace(item, scores=torch.arange(512.0).flip(0).repeat(5, 1))
    indices, _ = selection(SMALL, item)
    assert selection_problem(SMALL, item.scores, indices) == ""
    assert text in selection_problem(SMALL, item.scores, change(indices))


def test_a_mode_is_held_to_its_promise():
    scores = torch.ones(5, 512)
    low, high = torch.arange(32).repeat(5, 1), torch.arange(480, 512).repeat(5, 1)
    for ids in (low, low.flip(1), high):
        assert selection_problem(SMALL, scores, ids) == ""
    kept = {
        mode: [promise_problem(replace(SMALL, mode=mode), scores, ids) == "" for ids in (low, low.flip(1), high)]
        for mode in MODES
    }
    assert kept == {"off": [True] * 3, "set": [True, True, False], "order": [True, False, False]}


# ---- peers, on stand-ins for the libraries

LIBRARIES = {
    "sgl_kernel/__init__.py": """
        import torch
        __version__ = "0.4.5"
        def fast_topk_v2(score, lengths, topk, row_starts=None):
            assert topk == 2048 and score.dtype == torch.float32 and lengths.dtype == torch.int32
            return torch.topk(score, topk).indices.int()
    """,
    "sglang/__init__.py": "__version__ = '0.5.23'",
    "sglang/kernels/ops/attention/dsv4/topk.py": """
        import torch
        def plan_topk_v2(seq_lens):
            return ("plan", seq_lens)
        def topk_transform_paged_v2(scores, seq_lens, page_tables, out, page_size, metadata):
            assert metadata[0] == "plan" and metadata[1] is seq_lens
            ids = torch.topk(scores, out.shape[1]).indices
            out.copy_(page_tables.gather(1, ids // page_size) * page_size + ids % page_size)
        def topk_transform_ragged_v2(scores, seq_lens, *, out_offsets, out_indices):
            out_indices.copy_(torch.topk(scores, out_indices.shape[1]).indices + out_offsets[:, None])
    """,
    "sglang/kernels/ops/attention/deep_select.py": """
        import torch
        def topk_page_transform(input, topk, *, page_table, page_size, end):
            ids = torch.topk(input, topk).indices
            return (page_table.gather(1, ids // page_size) * page_size + ids % page_size).int()
    """,
    "flashinfer/__init__.py": """
        import torch
        __version__ = "0.7.2.post1"
        def top_k(input, k):
            return torch.topk(input, k)
        def top_k_page_table_transform(input, src_page_table, lengths, k, *, page_size):
            ids = torch.topk(input, k).indices
            return src_page_table.gather(1, ids // page_size) * page_size + ids % page_size
    """,
}
PEER_MODULES = ("sgl_kernel", "sglang", "flashinfer")


@pytest.fixture(autouse=True)
def no_real_libraries(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DSAGEN_PEER_SITE", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] in PEER_MODULES]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in PEER_MODULES]:
        del sys.modules[name]


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    for name, text in LIBRARIES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.setenv("DSAGEN_PEER_SITE", str(tmp_path))


@pytest.fixture
def untimed(monkeypatch):
    """Timing that runs every call eagerly and in a "capture", and gives a fixed time."""
    capturing = [False]

    def graph_time_us(calls):
        for capturing[0] in (False, True):
            for call in calls:
                call()
        capturing[0] = False
        return Timing(50.0, 0.02, len(calls), 9)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(topk_run, "graph_time_us", graph_time_us)
    monkeypatch.setattr(topk_run, "eager_cost_us", lambda calls: (4.0, 51.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)


WIDE = TopkBenchCase("fp32", 3, 4096, 2048, "off")


@pytest.mark.parametrize("case", [WIDE, replace(WIDE, rows=130)], ids=["decode", "prefill"])
@pytest.mark.usefixtures("libraries", "untimed")
def test_every_peer_is_called_timed_and_verified(case):
    inputs = topk_inputs(case, 2, device="cpu")
    found = [topk_run.measure_topk_peer(peer, case, inputs) for peer in TOPK_PEERS]
    assert [(figure.gpu_us, figure.note) for figure in found] == [(50.0, "")] * len(TOPK_PEERS)
    versions = {figure.name: figure.version for figure in found}
    assert versions["sglang-topk-v2"] == versions["deepselect"] == "0.5.23"
    assert [p.paged(case) for p in TOPK_PEERS] == [False, False, case.rows <= 128, True, False, True]


def test_peers_refuse_what_they_cannot_run():
    bf16, few = replace(WIDE, score="bf16"), replace(WIDE, k=512)
    refused = {peer.name: (peer.refuses(bf16), peer.refuses(few)) for peer in TOPK_PEERS}
    assert [name for name, (why, _) in refused.items() if why] == ["sglang-kernel", "sglang-topk-v2"]
    assert [name for name, (_, why) in refused.items() if why] == ["sglang-kernel"]
    odd = replace(WIDE, width=4032, page_size=63)
    assert [peer.name for peer in TOPK_PEERS if peer.refuses(odd)] == ["flashinfer-paged"]


@pytest.mark.usefixtures("untimed")
def test_a_missing_library_is_a_note():
    (found,) = [
        topk_run.measure_topk_peer(peer, WIDE, topk_inputs(WIDE, 1, device="cpu"))
        for peer in TOPK_PEERS
        if peer.name == "deepselect"
    ]
    assert found.gpu_us is None
    assert "cannot import sglang" in found.note and "pip install" in found.note


class StandInPeer:
    name, version = "stand-in", "1.0"

    def __init__(self, problem_in_set=None):
        self.problem_in_set = problem_in_set

    def paged(self, case):
        return False

    def refuses(self, case):
        return None

    def bind(self, case, inputs):
        def select(number, item):
            scores = -item.scores if number == self.problem_in_set else item.scores
            return torch.topk(scores, case.k).indices

        return [lambda number=number, item=item: select(number, item) for number, item in enumerate(inputs)]


@pytest.mark.usefixtures("untimed")
def test_each_timed_result_of_a_peer_is_verified():
    inputs = topk_inputs(SMALL, 3, device="cpu")
    assert topk_run.measure_topk_peer(StandInPeer(), SMALL, inputs).gpu_us == 50.0
    wrong = topk_run.measure_topk_peer(StandInPeer(problem_in_set=2), SMALL, inputs)
    assert wrong.gpu_us is None
    assert wrong.note.startswith("wrong: input set 2: row 0 does not hold torch.topk's values")


@pytest.mark.usefixtures("untimed")
def test_what_only_an_eager_call_wrote_does_not_pass():
    (item,) = topk_inputs(SMALL, 1, device="cpu")
    ids = []

    def writes_once():
        ids.append(torch.topk(item.scores, SMALL.k).indices)
        return ids[0]

    _, problem = topk_run.timed_and_verified(SMALL, [item], [writes_once], paged=False, promised=False)
    assert problem == "input set 0: slot 0 of row 0 is no index: -1; 160 slots are none"


# ---- the sweep, with a stand-in for kernels and device


class ExactKernels:
    """Answers with the reference; `spoil` changes the ids."""

    device = torch.device("cpu")

    def __init__(self, spec, spoil=lambda ids: ids):
        self.spec, self.spoil, self.calls = spec, spoil, []

    def prepare(self):
        self.prepared = True

    def topk_slugs(self, scores, *, k, starts=None):
        assert scores.shape == (SMALL.rows, SMALL.width) and k == SMALL.k and starts is None
        return (f"{self.spec.scores}-one", f"{self.spec.scores}-two")

    def topk(self, scores, *, k, lengths, page_table, page_size, out):
        return self._answer(scores, k, page_table, page_size, out)

    def _answer(self, scores, k, page_table, page_size, out, **seen):
        self.calls.append(seen)
        indices, _ = topk_reference(scores, k)
        return out.copy_(translate_reference(self.spoil(indices), page_table=page_table, page_size=page_size))


class KernelsWithModes(ExactKernels):
    """As above, with modes and plans."""

    def plan_topk(self, rows, max_cols, k):
        return SimpleNamespace(shape=(rows, max_cols, k))

    def topk(self, scores, *, k, lengths, page_table, page_size, out, determinism, plan):
        assert plan.shape == (*scores.shape, k)
        return self._answer(scores, k, page_table, page_size, out, mode=determinism)


@pytest.fixture
def measured(monkeypatch, untimed):
    def go(kind=ExactKernels, peers=(), spoil=lambda ids: ids, **options):
        made = []

        def load(spec):
            made.append(kind(spec, spoil))
            return made[-1]

        def cases(spec, score, modes):
            return [replace(SMALL, score=score, mode=mode) for mode in modes]

        monkeypatch.setattr(dsagen, "load", load, raising=False)
        monkeypatch.setattr(topk_run, "topk_cases", cases)
        monkeypatch.setattr(topk_run, "input_sets_for", lambda _, most: 2)
        monkeypatch.setattr(topk_run, "TOPK_PEERS", peers)
        return sweep.run_sweep([SPEC], with_peers=bool(peers), **options), made

    return go


def test_both_dtypes_are_measured_with_their_kernels(measured):
    figures, kernels = measured()
    assert [k.spec.scores for k in kernels] == ["fp32", "bf16"] and all(k.prepared for k in kernels)
    assert [(f.spec, f.case.score, f.case.mode, f.gpu_us, f.input_sets) for f in figures] == [
        ("v32_topk_h128", score, "order", 50.0, 2) for score in ("fp32", "bf16")
    ]
    assert [f.slugs for f in figures] == [("fp32-one", "fp32-two"), ("bf16-one", "bf16-two")]
    assert figures[0].floor_us == pytest.approx(topk_floor_us(SMALL, H200))


def test_every_mode_is_measured_where_there_are_modes(measured):
    figures, kernels = measured(KernelsWithModes)
    assert [f.case.mode for f in figures] == [*MODES, *MODES]
    assert {call["mode"] for call in kernels[0].calls} == set(MODES)
    assert {f.off_us for f in figures} == {50.0} and {f.off_ratio for f in figures} == {1.0}


def test_a_wrong_result_is_no_figure(measured):
    with pytest.raises(CheckFailed, match=r"v32_topk_h128: .* input set 0: row 0 does not hold"):
        measured(spoil=lambda ids: torch.arange(32).expand_as(ids))
    with pytest.raises(CheckFailed, match="mode order: row 0 has"):
        measured(spoil=lambda ids: ids.flip(1))


def test_records_and_peers_are_attached(measured):
    records = {case_key(asdict(SMALL)): 40.0}
    figures, _ = measured(KernelsWithModes, peers=(StandInPeer(),), records=records)
    assert [f.record_us for f in figures if f.case == SMALL] == [40.0]
    assert {f.peers for f in figures} == {(PeerFigure("stand-in", "stand-in", "1.0", 50.0),)}


def test_a_spec_without_a_measured_op_is_refused(monkeypatch):
    monkeypatch.setattr(sweep, "MEASURED_OPS", ("sparse_decode",))
    with pytest.raises(SpecError, match=r"^v32_topk_h128: bench measures sparse_decode, and the spec's ops are topk: "):
        sweep.run_sweep([SPEC])


def test_ops_are_measured_where_the_spec_has_them(measured, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "sweep_decode", lambda specs, **_: asked.extend(specs) or [])
    figures, _ = measured()
    assert asked == [] and len(figures) == 2


# ---- calls


def test_an_op_without_modes_promises_order():
    kernels = ExactKernels(SPEC)
    assert offered_modes(kernels.topk) == ("order",) and offered_modes(KernelsWithModes(SPEC).topk) == MODES
    with pytest.raises(ValueError, match="mode 'set' is not offered: order"):
        topk_calls(kernels, 1, 512, 32, "set")
    assert topk_calls(kernels, 1, 512, 32, "order").plan is None
