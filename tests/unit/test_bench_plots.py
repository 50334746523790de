"""Pictures of many shapes stay readable, and of records only those of a spec's kernels of today are shown."""

import json
import warnings
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from dsagen.bench import plots
from dsagen.bench.data import DecodeCase
from dsagen.bench.figures import DecodeFigures, PeerFigure
from dsagen.bench.recording import last_cases
from dsagen.cli import main
from dsagen.evidence import load_evidence, record, row_for
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.spec import load_spec

SLUG = "sparse_decode-main-hopper-sm_90a-kv.v32-dqk.576-dv.512-n.16-smem.227"
PEERS = (PeerFigure("a", "peer, heads padded to 64", "1", 90.0), PeerFigure("b", "refusing", "", None, "refused"))


def case(spec: str, batch: int, topk: int, gpu_us: float = 20.0, slug: str = SLUG) -> dict[str, object]:
    shape = DecodeCase("v32", 16, batch, 1, topk, 32768, 64)
    return DecodeFigures(spec, slug, "NVIDIA H200", shape, 2, 32, gpu_us, 0.01, 2, 4.0, 80.0, 1.5, PEERS).to_json()


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn, after it was saved, by its title."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn, close = {}, pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.update({figure.get_suptitle(): figure}))
    yield drawn
    close("all")


def entries(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def assert_readable(figure):
    """Labels and legend lie in the picture and on nothing else; of the axes something is left."""
    (legend,), panels = figure.legends, [axes for axes in figure.axes if axes.axison]
    box = legend.get_window_extent()
    assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1)
    assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1)
    for axes in panels:
        assert axes.bbox.width > 200 and axes.bbox.height > 200
        assert not box.overlaps(axes.get_tightbbox())
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            boxes = [tick.label1.get_window_extent() for tick in ticks if tick.label1.get_visible()]
            assert len(ticks) >= 2 and not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert not any(one.bbox.overlaps(other.bbox) for one, other in combinations(panels, 2))


def test_many_shapes_are_told_apart_and_nothing_is_covered(tmp_path, figures):
    """Twelve widths at many batches, neighbours among them, and five widths at one batch."""
    batches = (1, 16, 17, 128, 129, 132, 133)
    cases = [case("v32_h16", batch, 64 * place) for place in range(1, 13) for batch in batches]
    cases += [case("v32_h16", 24, 1024 + place) for place in range(5)]
    cases += [case("v32_h64", batch, topk) for batch in batches for topk in range(64, 64 * 11, 64)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page, *pictures = plots.write_plots(cases, tmp_path)
    assert [path.name for path in pictures] == [
        "v32_h16.us.png",
        "v32_h16.us.2.png",
        "v32_h64.us.png",
        "v32_h64.us.2.png",
        "sparse_decode.floor.png",
        "sparse_decode.floor.2.png",
        "sparse_decode.roofline.png",
    ]
    assert list(figures) == [part.split("</h3>")[0] for part in page.read_text().split("<h3>")[1:-1]]
    for figure in figures.values():
        assert_readable(figure)

    times, more_times, _, _, floors, more_floors, roofline = figures.values()
    assert [len([axes for axes in figure.axes if axes.lines]) for figure in (times, more_times)] == [9, 3]
    assert times.axes[0].get_title() == "topk 64" and more_times.axes[2].get_title() == "topk 768"
    for axes in times.axes:
        assert [line.get_label() for line in axes.lines] == ["dsagen", PEERS[0].label, "floor"]
        assert all(tuple(line.get_xdata()) == batches for line in axes.lines)
        assert list(axes.get_xticks()) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert entries(times) == ["dsagen", PEERS[0].label, "floor"]

    assert [len(entries(figure)) for figure in (floors, more_floors)] == [21, 3]
    assert all(entries(figure).count("floor") == 1 for figure in (floors, more_floors))
    styles = [(line.get_color(), line.get_marker()) for line in floors.axes[0].lines]
    assert len(styles) == 21 == len(set(styles))
    assert entries(roofline) == ["v32_h16", "v32_h64", "measured ceilings"]


def test_ticks_are_powers_of_two_around_the_batches_and_no_more_than_fit(tmp_path, figures):
    for batches, ticks in (((5, 6), [4, 8]), ((1, 3), [1, 2, 4]), ((1, 1 << 15), [4**power for power in range(9)])):
        plots.write_plots([case("v32_h16", batch, 64) for batch in batches], tmp_path)
        for figure in list(figures.values())[:2]:
            assert list(figure.axes[0].get_xticks()) == ticks
            assert_readable(figure)
        figures.clear()


def test_shapes_of_one_batch_have_no_line(tmp_path):
    pytest.importorskip("matplotlib")
    page, *pictures = plots.write_plots([case("v32_h16", 24, topk) for topk in (64, 128)], tmp_path)
    assert [path.name for path in pictures] == ["sparse_decode.roofline.png"]
    assert page.read_text().count("<tr><td>v32_h16<") == 2


def rows_of(cases, date, device="NVIDIA H200", **changed):
    """Rows of a run of split calls: of the main kernel, with columns in place of its own, and of the combine."""
    units = [render(plan) for plan in expand(load_spec("v32_h16"), ("sm_90a",)).plans()]
    ran = [next(unit for unit in units if name in unit.slug) for name in ("-main-", "-combine-")]
    columns = {"device": device, "spec": cases[0]["spec"], "toolchain": "nvcc 13.0.88", "driver": "580.0"}
    rows = [row_for(unit, "benchmark", date=date, figures={"cases": cases}, **columns) for unit in ran]
    return [replace(rows[0], **changed), rows[1]]


@pytest.fixture
def nothing_shipped(monkeypatch):
    monkeypatch.setattr("dsagen.bench.recording.load_evidence", lambda store: ())


@pytest.mark.usefixtures("nothing_shipped")
def test_records_of_kernels_that_the_spec_has_now_are_shown_and_no_others(tmp_path: Path) -> None:
    file, spec = tmp_path / "rows.jsonl", load_spec("v32_h16")
    other = SLUG.replace("hopper", "mma_sync")
    record(rows_of([case("v32_h16", batch, 64, 30.0) for batch in (1, 4)], "2030-01-01T00:00:00Z"), file)
    record(rows_of([case("v32_h16", 1, 64, 25.0)], "2030-01-02T00:00:00Z"), file)
    # The combine of both is today's: what ran before it is not.
    stale = [case("v32_h16", batch, 64, 5.0) for batch in (1, 8)]
    record(rows_of(stale, "2030-01-03T00:00:00Z", evidence_hash="0" * 64), file)
    body = [case("v32_h16", batch, 64, 6.0, other) for batch in (4, 16)]
    record(rows_of(body, "2030-01-04T00:00:00Z", slug=other, evidence_hash="1" * 64)[::-1], file)
    found = {shown["case"]["batch"]: shown["gpu_us"] for shown in last_cases([spec], file)}
    assert found == {1: 25.0, 4: 30.0}


@pytest.mark.usefixtures("nothing_shipped")
def test_the_device_is_the_last_that_ran_kernels_of_today(tmp_path: Path) -> None:
    file, spec = tmp_path / "rows.jsonl", load_spec("v32_h16")
    record(rows_of([case("v32_h16", 1, 64, 30.0)], "2030-01-01T00:00:00Z"), file)
    elsewhere = [{**case("v32_h64", 1, 64, 9.0), "device": "NVIDIA H100"}]
    record(rows_of(elsewhere, "2030-01-02T00:00:00Z", "NVIDIA H100"), file)
    assert [shown["gpu_us"] for shown in last_cases([spec], file)] == [30.0]


def test_shipped_figures_that_are_shown_are_of_kernels_of_today() -> None:
    spec = load_spec("v32_h16")
    of_today = {plan.slug for plan in expand(spec, ("sm_90a",)).plans()}
    measurements = [one for row in load_evidence() for one in row.figures.get("cases", ()) if one["spec"] == spec.name]
    assert {one["slug"] for one in measurements} - of_today, "an older body's records are there to be left out"
    shown = last_cases([spec])
    assert {one["slug"] for one in shown} <= of_today and all(one in measurements for one in shown)


@pytest.mark.usefixtures("nothing_shipped")
def test_the_last_record_is_shown_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    request = ["bench", "v32_h16", "--recorded", "--record", str(file)]
    assert main([*request, "--plot", str(tmp_path / "plots")]) == 2
    assert "no benchmark of the kernels that these specs have now is recorded" in capsys.readouterr().err
    record(rows_of([case("v32_h16", batch, 64) for batch in (1, 16, 128)], "2030-01-01T00:00:00Z"), file)
    assert main([*request, "--json"]) == 0
    assert [shown["case"]["batch"] for shown in json.loads(capsys.readouterr().out)["figures"]] == [1, 16, 128]
