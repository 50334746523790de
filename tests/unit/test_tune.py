"""Tuning on a scripted device: what is tried, in which order, what is taken, and the table that is written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from dsagen.arch import arch
from dsagen.bench import choices as measuring
from dsagen.bench import run as bench_run
from dsagen.bench.data import DecodeCase, make_pool
from dsagen.bench.timing import Timing
from dsagen.cli import main
from dsagen.errors import CheckFailed, DeviceError, GuardError, SpecError, StoreError, TableError
from dsagen.families.sparse_decode.choice_table import ChoiceTables, read_table
from dsagen.families.sparse_decode.family import FAMILY, with_all_bodies
from dsagen.families.sparse_decode.op import CLUSTER_SPLITS, DecodeShape
from dsagen.families.sparse_decode.reference import sparse_decode_reference
from dsagen.spec import load_spec
from dsagen.tune.run import Deadline, tune
from dsagen.tune.shapes import BATCHES, choices, shape_of, tuned_cases
from dsagen.tune.table import write_rows

SPEC = load_spec("v32_h16")
CELLS = with_all_bodies(FAMILY.expand(SPEC, arch("sm_90a")))
HOPPER, PORTABLE = (FAMILY.plan(cell.variant) for cell in CELLS if cell.role == "main")
TWO_CACHES = load_spec("v41_h16")


class ScriptedDevice:
    """Each step takes a second; `us` gives the time of a choice, or raises."""

    plans, sm_count = (HOPPER, PORTABLE), 132

    def __init__(self, us):
        self.us, self.now, self.begun, self.tried = us, 0.0, [], []

    def clock(self):
        return self.now

    def columns(self, slug):
        return {"text": f"text of {slug}", "device": "NVIDIA H200", "driver": "580", "toolchain": "nvcc 13"}

    def begin(self, case):
        self.begun.append(case)
        self.now += 1

    def measure(self, slug, num_splits, launches):
        self.now += 1
        self.tried.append((slug, num_splits, launches))
        return self.us(self.begun[-1], slug, num_splits, launches)


def run(device, shapes, limit=1e6, told=None):
    deadline = Deadline(limit, device.clock)
    return tune(device, tuned_cases(SPEC, shapes), deadline, (lambda _: None) if told is None else told.append)


def by_splits(_, slug, num_splits, launches):
    """Fastest with 8 splits of the hopper body in one launch."""
    return 10 + abs(num_splits - 8) + (slug == PORTABLE.slug) + 0.5 * launches


def test_choices_that_the_device_has_no_room_for_are_left_out_and_told():
    def us(case, slug, num_splits, launches):
        if launches == 1 and num_splits > 1:
            raise GuardError("[SD-30] one launch: this process may use too few multiprocessors")
        return by_splits(case, slug, num_splits, launches)

    told = []
    found = run(ScriptedDevice(us), "1:2048", told=told)
    (row,) = found.rows
    assert (row.kernel, row.num_splits, row.launches) == (HOPPER.slug, 8, 2) and not found.wrong
    assert all(other.num_splits == 1 for other in row.beside if other.launches == 1)
    assert sum(text.startswith("left out: ") and "[SD-30]" in text for text in told) == 3


def test_default_shapes_are_those_of_a_decode_step():
    cases = tuned_cases(SPEC)
    assert [case.queries for case in cases] == list(BATCHES) and {case.topk for case in cases} == {2048}
    widths = {(case.topk, case.extra_topk) for case in tuned_cases(TWO_CACHES)}
    assert widths == {(128, 512)}


def test_shapes_are_read_and_sorted():
    cases = tuned_cases(SPEC, "16:512, 4x2:2048,1,16:512")
    assert [(case.batch, case.s_q, case.topk) for case in cases] == [(16, 1, 512), (1, 1, 2048), (4, 2, 2048)]
    (case,) = tuned_cases(TWO_CACHES, "3:100+300")
    assert (case.topk, case.extra_topk, case.extra_format) == (100, 300, "v41_fp4_interleaved")


@pytest.mark.parametrize(
    ("spec", "shapes", "message"),
    [
        (SPEC, "16y2", "--shapes: '16y2' is no shape: expected BATCH"),
        (SPEC, "1,", "--shapes: '' is no shape"),
        (SPEC, "0:64", "batch 0 is outside 1..2147483647 for v32_h16"),
        (SPEC, "1:2049", "topk 2049 is outside 1..2048 for v32_h16"),
        (SPEC, "1:2048+1", "extra_topk 1 is outside 0..0"),
        (SPEC.replace(determinism="batch_invariant"), None, "neither kernel nor splits may depend on the batch"),
        (load_spec("v32_topk_h128"), None, "tune is for sparse_decode, and its ops are topk"),
        (load_spec("gqa_h64"), None, "such calls are not measured"),
    ],
)
def test_what_cannot_be_tuned_is_told(spec, shapes, message):
    with pytest.raises(SpecError, match=message.replace("[", r"\[")):
        tuned_cases(spec, shapes)


def test_choices_begin_with_what_is_taken_untuned():
    tried = choices(DecodeShape(1, 1, 16, 2048), (HOPPER, PORTABLE), 132)
    assert (tried[0].slug, tried[0].num_splits, tried[0].launches) == (HOPPER.slug, 32, 2)
    assert len(set(tried)) == len(tried)
    splits = {choice.num_splits for choice in tried}
    assert splits == {-(-32 // length) for length in range(1, 33)}
    assert {c.slug for c in tried if c.num_splits > 1 and c.launches == 2} == {PORTABLE.slug, HOPPER.slug}
    assert {(c.slug, c.num_splits) for c in tried if c.launches == 1 and c.num_splits > 1} == {
        (HOPPER.slug, splits) for splits in CLUSTER_SPLITS
    }
    assert all(choice.launches == 1 for choice in tried if choice.num_splits == 1)


def test_choices_are_those_that_fit_the_device():
    tried = choices(DecodeShape(64, 1, 16, 2048), (HOPPER, PORTABLE), 132)
    assert {choice.num_splits for choice in tried} == {1, 2, 3, 4}  # at most two rounds
    assert {choice.num_splits for choice in tried if choice.launches == 1} == {1, 2, 4}
    assert [c.num_splits for c in choices(DecodeShape(300, 1, 16, 2048), (PORTABLE,), 132)] == [1]


def test_the_fastest_choice_becomes_a_row():
    device, told = ScriptedDevice(by_splits), []
    found = run(device, "1,16", told=told)
    assert [row.tokens for row in found.rows] == [(1, 1), (9, 16)]
    for row in found.rows:
        assert (row.kernel, row.num_splits, row.launches, row.gpu_us) == (HOPPER.slug, 8, 1, 10.5)
        assert (row.heads, row.topk, row.extra_topk) == (16, (2048, 2048), (0, 0))
        assert {(other.kernel, other.launches): other.gpu_us for other in row.beside} == {
            (PORTABLE.slug, 2): 12.0, (HOPPER.slug, 2): 11.0, (PORTABLE.slug, 1): 18.5
        } if row.tokens == (1, 1) else True  # fmt: skip
    assert (found.wrong, found.left) == ([], [])
    assert told[0].startswith(f"batch 1, s_q 1, heads 16, topk 2048: 10.50 us ({HOPPER.slug}, 8 splits, one launch); ")
    again = ScriptedDevice(by_splits)
    run(again, "1,16")
    assert again.tried == device.tried


def test_each_width_has_regions_of_its_own():
    found = run(ScriptedDevice(by_splits), "4:512,6:512,4:2048")
    assert [(row.topk[0], row.tokens) for row in found.rows] == [(512, (3, 4)), (512, (5, 6)), (2048, (3, 4))]


def test_within_noise_the_untuned_choice_stays():
    def nearly(_, slug, num_splits, launches):
        return 10.0 if (slug, num_splits, launches) == (HOPPER.slug, 32, 2) else 9.95

    (row,) = run(ScriptedDevice(nearly), "1").rows
    assert (row.kernel, row.num_splits, row.launches) == (HOPPER.slug, 32, 2)


def test_a_wrong_choice_is_never_taken():
    def wrong(case, slug, num_splits, launches):
        if slug == HOPPER.slug and launches == 1:
            raise CheckFailed("one launch is wrong")
        return by_splits(case, slug, num_splits, launches)

    found = run(ScriptedDevice(wrong), "1")
    assert (found.rows[0].kernel, found.rows[0].launches) == (HOPPER.slug, 2)
    assert set(found.wrong) == {"one launch is wrong"}


def test_where_all_are_wrong_there_is_no_row():
    def wrong(*_):
        raise CheckFailed("wrong")

    told = []
    assert run(ScriptedDevice(wrong), "1", told=told).rows == []
    assert told == ["batch 1, s_q 1, heads 16, topk 2048: no choice gave right outputs"]


def test_the_time_limit_ends_it_with_what_there_is():
    whole = ScriptedDevice(by_splits)
    run(whole, "1")
    steps = 1 + len(whole.tried)
    device = ScriptedDevice(by_splits)
    found = run(device, "1,16,64", limit=steps + 4.5)
    # Two choices of the second case, compared: a row. The third case was not begun.
    assert [row.tokens for row in found.rows] == [(1, 1), (9, 16)]
    assert [case.batch for case in found.left] == [64] and device.now <= steps + 4.5
    assert run(ScriptedDevice(by_splits), "1,16", limit=steps + 2.5).left == tuned_cases(SPEC, "16")
    assert run(ScriptedDevice(by_splits), "1", limit=0.5).rows == []


def test_rows_are_read_again_and_decide(tmp_path):
    path = tmp_path / "table.jsonl"
    rows = run(ScriptedDevice(by_splits), "1,16").rows
    write_rows(path, rows)
    tables = ChoiceTables(read_table(path))
    decision = tables.decide(
        DecodeShape(9, 1, 16, 2048), (PORTABLE, HOPPER), "NVIDIA H200", lambda plan: f"text of {plan.slug}", "off"
    )
    assert decision.row == replace(rows[1], place=f"{path}:2")


def test_new_rows_replace_those_of_the_same_subject_only(tmp_path):
    path = tmp_path / "table.jsonl"
    (row,) = run(ScriptedDevice(by_splits), "1").rows
    others = [replace(row, device="NVIDIA H100"), replace(row, heads=8), replace(row, topk=(512, 512))]
    write_rows(path, [replace(row, kernel=PORTABLE.slug, num_splits=9), *others])
    write_rows(path, [row])
    found = [replace(read, place="") for read in read_table(path)]
    assert found == [*others, row]
    assert [item.name for item in tmp_path.iterdir()] == ["table.jsonl"]


def test_a_place_that_cannot_be_written(tmp_path):
    (row,) = run(ScriptedDevice(by_splits), "1").rows
    with pytest.raises(StoreError, match="cannot be written"):
        write_rows(tmp_path / "none" / "table.jsonl", [row])


# ---- the measurer, with stand-ins for kernels and device

SMALL = DecodeCase("v32", heads=16, batch=2, s_q=1, topk=16, kv_tokens=64, page_size=16)


class ExactKernels:
    """Answers with the reference, times the error of a kernel, which may be of one row only."""

    device = torch.device("cpu")

    def __init__(self, errors):
        self.errors, self.rebound = errors, 0

    def plan_choice(self, shape, slug, num_splits, launches):
        assert shape == shape_of(SMALL)
        self.slug = slug
        return self

    def rebind(self):
        self.rebound += 1

    def sparse_decode(self, q, k_cache, indices, *, plan, softmax_scale, out, lse):
        want = sparse_decode_reference(q, SMALL.record, k_cache, indices, sm_scale=softmax_scale)
        found = want.out.view_as(out).clone()
        found[-1] *= self.errors[self.slug]
        out.copy_(found)
        lse.copy_(want.lse.view(SMALL.batch, SMALL.s_q, SMALL.heads).transpose(1, 2))
        return out, lse


def measurer(monkeypatch, errors, checked_rows=32):
    made = measuring.DeviceMeasurer.__new__(measuring.DeviceMeasurer)
    made.spec, made._seed, made._kernels, made._pools = SPEC, 0, ExactKernels(errors), bench_run.Pools(False)
    monkeypatch.setattr(bench_run, "make_pool", lambda name, **kw: make_pool(name, 1024, **kw))
    monkeypatch.setattr(bench_run, "input_sets_for", lambda _: 2)
    monkeypatch.setattr(bench_run, "CHECKED_ROWS", checked_rows)
    monkeypatch.setattr(measuring, "graph_time_us", lambda calls: Timing(50.0, 0.02, len(calls), 9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made.begin(SMALL)
    return made


def test_right_choices_are_timed(monkeypatch):
    made = measurer(monkeypatch, {"first": 1.0, "second": 1.0})
    assert [made.measure(slug, 2, 2) for slug in ("first", "second")] == [50.0, 50.0]
    assert made._kernels.rebound == 2


def test_choices_are_compared_with_the_reference(monkeypatch):
    made = measurer(monkeypatch, {"first": 1.05})
    with pytest.raises(CheckFailed, match=r"first, 2 splits in 1 launches: .*out: "):
        made.measure("first", 2, 1)


def test_choices_are_compared_in_whole_with_the_first(monkeypatch):
    made = measurer(monkeypatch, {"first": 1.0, "second": 1.2}, checked_rows=1)  # which is not the last
    assert made.measure("first", 2, 2) == 50.0
    with pytest.raises(CheckFailed, match="beside the first choice: out: "):
        made.measure("second", 2, 2)


def test_without_a_gpu_it_is_refused_with_the_reason(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="choices are measured on a GPU that the spec declares"):
        measuring.DeviceMeasurer(SPEC, bench_run.Pools(False))
    assert main(["tune", "v32_h16", "-o", str(tmp_path / "table.jsonl")]) == 5
    assert "error: no CUDA device" in capsys.readouterr().err
    assert main(["tune", "v32_h16", "--shapes", "1:4096"]) == 2


# ---- the command


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    devices = []

    def make(spec, pools, seed):
        device = ScriptedDevice(by_splits)
        device.device = "NVIDIA H200"
        devices.append(device)
        return device

    monkeypatch.setattr(measuring, "DeviceMeasurer", make)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    return devices


def test_the_command_writes_the_store_s_table(scripted, capsys, tmp_path):
    assert main(["tune", "v32_h16", "--shapes", "1,16", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tables"]
    path = tmp_path / "store" / "choices" / "nvidia-h200.jsonl"
    assert (found["file"], len(found["rows"]), found["not_measured"]) == (str(path), 2, [])
    assert [row.num_splits for row in read_table(path)] == [8, 8]
    assert main(["tune", "v32_h16", "--shapes", "1"]) == 0
    assert f"v32_h16: 1 row in {path}\n" in capsys.readouterr().out


def test_the_command_refuses_a_broken_table_before_it_measures(scripted, capsys, tmp_path):
    path = tmp_path / "table.jsonl"
    path.write_text("{}")
    assert main(["tune", "v32_h16", "-o", str(path)]) == TableError.exit_code
    assert f"{path}:1: field kernel: missing" in capsys.readouterr().err and scripted == []


def test_the_command_fails_for_wrong_outputs_and_keeps_what_is_right(monkeypatch, capsys, tmp_path):
    def us(case, slug, num_splits, launches):
        if slug == HOPPER.slug:
            raise CheckFailed("hopper is wrong")
        return 10.0 + num_splits

    monkeypatch.setattr(measuring, "DeviceMeasurer", lambda *_: ScriptedDevice(us))
    path = tmp_path / "table.jsonl"
    assert main(["tune", "v32_h16", "--shapes", "1", "-o", str(path)]) == CheckFailed.exit_code
    assert "gave wrong outputs, none of them taken" in capsys.readouterr().err
    assert [row.kernel for row in read_table(path)] == [PORTABLE.slug]
