"""Lists of shapes beside the best peer of each: the shipped list, verdicts, the summary, what is timed with what."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from decode_stand_ins import ExactKernels, StandInPeer

import dsagen
from dsagen.bench import run, shape_run, shapes, sweep, verdicts
from dsagen.bench.data import DecodeCase, make_pool
from dsagen.bench.figures import DecodeFigures, PeerFigure, case_key
from dsagen.bench.shapes import Shape, case_of, load_shapes, shipped_lists, specs_of
from dsagen.bench.timing import Timing
from dsagen.bench.verdicts import ComparedShape, summary_lines
from dsagen.cli import main
from dsagen.errors import CheckFailed, SpecError, StoreError
from dsagen.spec import load_spec

SPEC = load_spec("v32_h16")
SLUG = "sparse_decode-main-mma_sync-sm_90a-kv.v32-dqk.576-dv.512-n.16-smem.227"


# ---- lists


def test_the_shipped_list_has_sixty_shapes_with_their_corners():
    assert list(shipped_lists()) == ["decode60"]
    found = load_shapes("decode60")
    assert len({shape.sizes for shape in found}) == len(found) == 60
    values = {name: {getattr(shape, name) for shape in found} for name in ("batch", "s_q", "topk", "heads")}
    assert values["heads"] == {8, 16, 32} and values["s_q"] == {1, 2, 3, 4}
    assert {1, 17, 128, 129, 132, 133, 256} <= values["batch"] and max(values["batch"]) == 256
    assert {128, 512, 1024, 2048} <= values["topk"] and (min(values["topk"]), max(values["topk"])) == (128, 2048)
    by_corner = {shape.corner: shape.sizes for shape in found}
    assert (by_corner["smallest"], by_corner["largest"]) == ((1, 1, 128, 8), (256, 4, 2048, 32))
    # What has to be met at one and at 128 requests is in it, for each head count.
    assert {(batch, 1, 2048, heads) for batch in (1, 16, 128) for heads in (8, 16, 32)} <= {s.sizes for s in found}


def test_specs_and_cases_of_shapes():
    found = load_shapes("decode60")
    made = specs_of(SPEC, found)
    assert [(spec.name, spec.heads) for spec in made] == [
        ("v32_h16_heads8", 8),
        ("v32_h16", 16),
        ("v32_h16_heads32", 32),
    ]
    assert case_of(SPEC, Shape(3, 2, 512, 16)) == DecodeCase("v32", 16, 3, 2, 512, 32768, 64)
    with pytest.raises(SpecError, match=r"narrow: takes at most 1024 columns.*a shape has 2048: b 1, s_q 1, topk 2048"):
        specs_of(SPEC.replace(name="narrow", topk=1024), found)
    with pytest.raises(SpecError, match=r"topk 40000 > kv_tokens 32768: .* use topk <= 32768"):
        specs_of(SPEC.replace(topk=65536), [*found, Shape(1, 1, 40000, 16)])
    with pytest.raises(SpecError, match="KV heads: such calls are not measured"):
        specs_of(load_spec("gqa_h64"), found)


GOOD = '{"batch": 1, "s_q": 1, "topk": 128, "heads": 8}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no shape"),
        ("{", r":1: no JSON"),
        ("[1]", r":1: \[1\]: no JSON object"),
        (f'\n{GOOD}\n{GOOD.replace("}", ", ")}"corner": "again"}}', r":3: b 1, .* \(again\) stands in line 2 already"),
        (GOOD.replace("128", "0"), r":1: topk: 0 is no whole number of 1 or more"),
        (GOOD.replace("128", "true"), r":1: topk: True is no whole number"),
        (GOOD.replace('"s_q": 1, ', ""), r":1: s_q: None is no whole number"),
        (GOOD.replace("s_q", "sq"), r":1: unknown field 'sq'; fields are batch, s_q, topk, heads and corner"),
        (GOOD.replace("}", ', "corner": 1}'), r":1: corner: 1 is no text"),
    ],
)
def test_a_list_that_is_wrong_names_line_and_field(text, message, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_shapes(str(path))


def test_a_list_that_is_missing_or_no_text_is_said(tmp_path):
    with pytest.raises(SpecError, match="decode6: no file, and no list of shapes of that name: there is decode60"):
        load_shapes("decode6")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="cannot be read as text"):
        load_shapes(str(tmp_path / "bytes"))
    (tmp_path / "own").write_text(GOOD)
    assert load_shapes(str(tmp_path / "own")) == (Shape(1, 1, 128, 8),)


# ---- verdicts


def compared(gpu_us, *peers, batch=4, corner=""):
    """A shape that takes `gpu_us`, beside peers as (name, us or None)."""
    case = DecodeCase("v32", 16, batch, 1, 2048, 32768, 64)
    figures = DecodeFigures("v32_h16", SLUG, "NVIDIA H200", case, 1, 32, gpu_us, 0.01, 2, 4.0, 80.0, 1.25)
    found = tuple(PeerFigure(name, f"{name}, padded", "1", us, "" if us else "refuses") for name, us in peers)
    return ComparedShape(Shape(batch, 1, 2048, 16, corner), replace(figures, peers=found))


@pytest.mark.parametrize(
    ("peers", "verdict", "change", "best"),
    [
        ((("a", 20.0), ("b", 16.0)), "faster", "-37.5%", "b, padded"),
        ((("a", 8.0), ("b", 16.0)), "slower", "+25.0%", "a, padded"),
        ((("a", None), ("b", 9.81)), "level", "+1.9%", "b, padded"),
        ((("a", 10.21),), "faster", "-2.1%", "a, padded"),
        ((("a", 9.79),), "slower", "+2.1%", "a, padded"),
        ((("a", None),), "no peer", "-", "-"),
        ((), "no peer", "-", "-"),
    ],
)
def test_the_verdict_is_against_the_fastest_peer_that_ran(peers, verdict, change, best):
    found = compared(10.0, *peers, corner="why")
    assert (found.verdict, found.change) == (verdict, change)
    row = dict(zip(verdicts.HEADER, found.cells(), strict=True))
    assert (row["verdict"], row["time"], row["best peer"], row["GPU us"]) == (verdict, change, best, "10.0")
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (plain["verdict"], plain["corner"], plain["case"]["batch"]) == (verdict, "why", 4)
    assert plain["best_peer"] == (None if best == "-" else best)
    if plain["ratio"] is not None:
        assert plain["ratio"] == pytest.approx(10.0 / plain["best_peer_us"], abs=1e-4)


def test_the_summary_names_what_is_not_faster_and_what_peers_could_not_do():
    lines = summary_lines(
        [
            compared(10.0, ("a", 40.0), batch=1),
            compared(10.0, ("a", 8.0), batch=2, corner="odd"),
            compared(10.0, ("a", 5.0), batch=3),
            compared(10.0, ("a", 10.0), ("b", None), batch=4),
            compared(10.0, ("a", None), ("b", None), batch=5),
        ]
    )
    assert lines == [
        "of 5 shapes: 1 faster than the best peer, 1 level (within 2%), 2 slower, 1 that no peer ran",
        "time beside the best peer's: -11.1% in the geometric mean",
        "  least: faster: b 1, s_q 1, topk 2048, 16 heads: 10.0 us, a, padded 40.0 us (-75.0%)",
        "  most: slower: b 3, s_q 1, topk 2048, 16 heads: 10.0 us, a, padded 5.0 us (+100.0%)",
        "slower: b 3, s_q 1, topk 2048, 16 heads: 10.0 us, a, padded 5.0 us (+100.0%)",
        "slower: b 2, s_q 1, topk 2048, 16 heads (odd): 10.0 us, a, padded 8.0 us (+25.0%)",
        "b was not timed in 2 of 5: refuses",
        "a was not timed in 1 of 5: refuses",
    ]
    assert summary_lines([compared(1.0)]) == [
        "of 1 shapes: 0 faster than the best peer, 0 level (within 2%), 0 slower, 1 that no peer ran"
    ]


# ---- the run, with stand-ins for kernels, peers and device


SMALL_SHAPES = (Shape(2, 1, 16, 3, "smallest"), Shape(1, 2, 8, 16))


class TimedCalls:
    """A contestant whose calls run once; then it takes the next time of `us`, or raises what stands there."""

    us: list
    turns: list

    def __init__(self, calls, *, warm_ms):
        for call in calls:
            call()
        us = TimedCalls.us.pop(0)
        if isinstance(us, BaseException):
            raise us
        self.timing = Timing(us, 0.02, len(calls), 10)
        self.open = True

    def close(self):
        self.open = False


def take_turns(contestants):
    assert all(one.open for one in contestants)
    TimedCalls.turns.append(list(contestants))


@pytest.fixture
def measured(monkeypatch):
    """Sets up stand-ins that take `us` in the order of contestants; returns the kernels by the name of their spec."""

    def go(us, peers=(), error=1.0):
        loaded = {}

        def load(spec):
            return loaded.setdefault(spec.name, ExactKernels(spec, error))

        TimedCalls.us, TimedCalls.turns = list(us), []
        device = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
        for place, name, value in (
            (dsagen, "load", load),
            (shapes, "KV_TOKENS", 64),
            (shapes, "PAGE_SIZE", 16),
            (run, "make_pool", lambda name, **options: make_pool(name, 1024, **options)),
            (run, "input_sets_for", lambda _: 2),
            (shape_run, "PEERS", peers),
            (shape_run, "Contestant", TimedCalls),
            (shape_run, "take_turns", take_turns),
            (shape_run, "eager_cost_us", lambda calls, **_: (4.0, 51.0)),
            (torch.cuda, "get_device_properties", lambda _: device),
            (sweep, "current_device_name", lambda: device.name),
        ):
            monkeypatch.setattr(place, name, value, raising=False)
        return loaded

    return go


def test_contestants_of_a_shape_take_turns_on_the_same_inputs(measured):
    fast, refusing = StandInPeer(name="fast"), StandInPeer(refusal="needs 64 heads", name="picky")
    loaded = measured([9.0, 5.0, 30.0, 40.0], (fast, refusing, StandInPeer(error=1.2, name="wrong")))
    keys = {case_key(case_of(SPEC, SMALL_SHAPES[1]).to_json()): 20.0}
    found = list(shape_run.sweep_shapes(SPEC, SMALL_SHAPES, with_peers=True, records=keys))
    assert [(one.shape, one.figures.spec, one.figures.gpu_us) for one in found] == [
        (SMALL_SHAPES[0], "v32_h16_heads3", 9.0),
        (SMALL_SHAPES[1], "v32_h16", 30.0),
    ]
    assert [one.verdict for one in found] == ["slower", "faster"]
    assert [peer.gpu_us for peer in found[0].figures.peers] == [5.0, None, None]
    notes = [peer.note for peer in found[0].figures.peers]
    assert notes[:2] == ["", "needs 64 heads"] and notes[2].startswith("wrong: ")
    assert [len(turn) for turn in TimedCalls.turns] == [2, 2] and not any(
        one.open for turn in TimedCalls.turns for one in turn
    )
    assert all(kernels.prepared for kernels in loaded.values())
    assert [one.figures.record_us for one in found] == [None, 20.0]


def test_without_peers_shapes_are_timed_alone(measured):
    measured([9.0, 8.0], (StandInPeer(),))
    found = list(shape_run.sweep_shapes(SPEC, SMALL_SHAPES))
    assert [one.verdict for one in found] == ["no peer", "no peer"] and [len(turn) for turn in TimedCalls.turns] == [
        1,
        1,
    ]


def test_a_wrong_shape_is_left_out_and_a_peer_that_fails_is_a_note(measured):
    measured([], error=1.05)
    wrong = []
    assert list(shape_run.sweep_shapes(SPEC, SMALL_SHAPES, wrong=wrong.append)) == []
    assert len(wrong) == 2 and all("was not timed" in text for text in wrong)
    with pytest.raises(CheckFailed):
        list(shape_run.sweep_shapes(SPEC, SMALL_SHAPES))
    measured([9.0, RuntimeError("not in a capture")], (StandInPeer(),))
    (found,) = shape_run.sweep_shapes(SPEC, SMALL_SHAPES[:1], with_peers=True)
    assert found.verdict == "no peer" and found.figures.peers[0].note == "failed: RuntimeError: not in a capture"


def test_the_command_prints_verdicts_and_a_summary_or_one_document(measured, tmp_path, monkeypatch, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(vars(shape)) + "\n" for shape in SMALL_SHAPES))
    recorded = []
    monkeypatch.setattr(
        "dsagen.bench.recording.record_figures", lambda spec, figures, file: recorded.append((spec.name, len(figures)))
    )
    measured([9.0, 18.0, 30.0, 20.0], (StandInPeer(),))
    assert main(["bench", "v32_h16", "--shape-list", str(path), "--peers"]) == 0
    text = capsys.readouterr()
    assert "slower: b 1, s_q 2, topk 8, 16 heads: 30.0 us, stand-in, padded 20.0 us (+50.0%)" in text.out
    assert "of 2 shapes: 1 faster than the best peer, 0 level (within 2%), 1 slower, 0 that no peer ran" in text.out
    assert "1 of 2: faster: b 2" in text.err
    assert recorded == [("v32_h16_heads3", 1), ("v32_h16", 1)]
    measured([9.0, 18.0, 30.0, 20.0], (StandInPeer(),))
    assert main(["bench", "v32_h16", "--shape-list", str(path), "--peers", "--json", "--quiet"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["verdicts"] == {"faster": 1, "level": 0, "slower": 1, "no peer": 0}
    assert [row["verdict"] for row in plain["shapes"]] == ["faster", "slower"] and plain["device"] == "NVIDIA H200"
    assert plain["not_measured"] == 0
    measured([], error=1.05)
    assert main(["bench", "v32_h16", "--shape-list", str(path)]) == 4
    assert "2 shapes gave wrong outputs" in capsys.readouterr().err


def test_what_was_measured_is_shown_and_recorded_however_the_run_ends(measured, tmp_path, monkeypatch, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(vars(shape)) + "\n" for shape in SMALL_SHAPES))
    recorded = []
    monkeypatch.setattr(
        "dsagen.bench.recording.record_figures", lambda spec, figures, file: recorded.append((spec.name, len(figures)))
    )
    measured([9.0, KeyboardInterrupt()])
    assert main(["bench", "v32_h16", "--shape-list", str(path)]) == 130
    text = capsys.readouterr().out
    assert "of 1 shapes: 0 faster" in text and "1 shapes were not measured in " in text
    assert recorded == [("v32_h16_heads3", 1), ("v32_h16", 0)]
    # The clock is at the limit once the first shape is measured.
    measured([9.0])
    clock = iter([0.0, 5.0, 5.1, 5.2])
    monkeypatch.setattr(shape_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("dsagen.cli.comparing.time", shape_run.time)
    assert main(["bench", "v32_h16", "--shape-list", str(path), "--time-limit", "5", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["not_measured"], len(plain["shapes"]), plain["seconds"]) == (1, 1, 5.2)


def test_what_cannot_be_recorded_is_shown_all_the_same(measured, tmp_path, monkeypatch, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(vars(SMALL_SHAPES[0])))

    def record(*_):
        raise StoreError("evidence cannot be written")

    monkeypatch.setattr("dsagen.bench.recording.record_figures", record)
    measured([9.0])
    assert main(["bench", "v32_h16", "--shape-list", str(path)]) != 0
    text = capsys.readouterr()
    assert "of 1 shapes: 0 faster" in text.out and "evidence cannot be written" in text.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v32_h16", "--batch", "1"], "--batch: means nothing beside --shape-list"),
        (["v32_h16", "--heads", "8"], "--heads: means nothing beside --shape-list"),
        (["v32_h16", "--host"], "--host: means nothing beside --shape-list"),
        (["v32_h16", "--op", "topk"], "--op: means nothing beside --shape-list"),
        (["v32_topk_h128"], "v32_topk_h128: shapes are those of sparse_decode, which its ops lack"),
        (["v4_h16"], "v4_h16: takes at most"),
    ],
)
def test_what_does_not_go_with_a_list_is_refused_without_a_device(arguments, message, capsys):
    assert main(["bench", *arguments, "--shape-list", "decode60"]) == 2
    assert message in capsys.readouterr().err


def test_a_time_limit_is_for_lists(capsys):
    assert main(["bench", "v32_h16", "--time-limit", "5"]) == 2
    assert "--time-limit: means nothing without --shape-list" in capsys.readouterr().err
