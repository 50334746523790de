"""`dsagen explain`'s drawings: what a multiprocessor holds, the pipeline, and the page with rooflines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsagen.arch import H200
from dsagen.cli import main
from dsagen.cli.charts import WIDTH, Point, Roof, memory_map, roofline
from dsagen.cli.drawing import occupancy_lines, pipeline_lines, register_lines, register_shares
from dsagen.evidence import row_for
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas, resources
from dsagen.render import render
from dsagen.spec import load_spec, shipped_specs


class Checker(HTMLParser):
    """Tags that close what they opened, ids, links and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag != "meta":
            self.open.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.fetched += [str(value) for name, value in attrs if name in ("src", "xlink:href", "data", "action")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img", "object") else []
        assert not [name for name in values if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def page_of(tmp_path: Path, spec: str) -> tuple[str, Checker]:
    assert main(["explain", spec, "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return text, checker


@pytest.mark.parametrize("spec", shipped_specs())
def test_a_page_is_whole_and_needs_nothing_else(tmp_path, capsys, spec):
    text, checker = page_of(tmp_path, spec)
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    slugs = [plan.slug for plan in expand(load_spec(spec)).plans()]
    assert checker.ids == slugs and checker.links == [f"#{slug}" for slug in slugs]
    assert checker.fetched == [] and "http" not in text.replace("http-equiv", "") and "url(" not in text
    shown = "".join(checker.text)
    for plan in expand(load_spec(spec)).plans():
        assert all(field.note in shown for field in (*plan.smem, *plan.params))
        assert all(guard.guard_id in shown for guard in plan.guards)
    for cell in expand(load_spec(spec)).refused:
        assert cell.refusal in shown


@pytest.mark.usefixtures("no_evidence")
def test_the_roofline_shows_each_recorded_case(tmp_path, monkeypatch):
    """The last record of the spec itself, and where there is none those of others."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    units = [render(plan) for plan in expand(load_spec("v32_h16")).plans()]

    def recorded(unit, spec: str, date: str, rates: tuple[float, ...]):
        cases = [
            {
                "case": {"batch": number, "s_q": 1},
                "gpu_us": 9.0,
                "floor_us": 3.0,
                "tb_per_s": rate / 50,
                "tflops_per_s": rate,
            }
            for number, rate in enumerate(rates, 1)
        ]
        columns = {"device": H200.device, "toolchain": "nvcc 13.0.88", "driver": "580", "figures": {"cases": cases}}
        return row_for(unit, "benchmark", spec=spec, date=date, **columns)

    rows = [
        recorded(units[0], "v32_h16", "2026-01-02T00:00:00Z", (11.0, 123.0)),
        recorded(units[0], "v32_h16", "2026-01-01T00:00:00Z", (77.0,)),
        recorded(units[0], "v32_h8", "2026-01-03T00:00:00Z", (66.0,)),
        recorded(units[1], "v32_h8", "2026-01-04T00:00:00Z", (55.0,)),
    ]
    (tmp_path / "store" / "evidence").mkdir(parents=True)
    (tmp_path / "store" / "evidence" / "x.jsonl").write_text("".join(row.to_line() for row in rows))
    text, checker = page_of(tmp_path, "v32_h16")
    shown = "".join(checker.text)
    assert "batch 1: 11 TFLOP/s" in shown and "batch 2: 123 TFLOP/s" in shown and "batch 1: 55 TFLOP/s" in shown
    assert "77 TFLOP/s" not in shown and "66 TFLOP/s" not in shown
    assert "4.53 TB/s" in shown and "797 TFLOP/s" in shown
    assert "Measured on NVIDIA H200, 2026-01-02" in shown and "Measured on NVIDIA H200, 2026-01-04" in shown
    assert text.count('class="dot"') == 3


def test_a_point_lies_where_its_numbers_say():
    roofs = [Roof(lambda x: 10 * x, "slope"), Roof(lambda x: 1000.0, "flat")]
    svg = roofline([Point(10, 10, "a"), Point(100, 1000, "b")], roofs, "x", "y", "t")
    dots = dict(re.findall(r'cy="([\d.]+)" r="4"><title>(\w)</title>', svg))
    places = {label: float(y) for y, label in dots.items()}
    xs = {label: float(x) for x, label in re.findall(r'cx="([\d.]+)" cy="[\d.]+" r="4"><title>(\w)</title>', svg)}
    line = [tuple(map(float, pair.split(","))) for pair in re.search(r'class="roof" points="([^"]+)"', svg)[1].split()]

    def roof_at(x: float) -> float:
        return min(line, key=lambda place: abs(place[0] - x))[1]

    # b is on the roof, a one decade below it; y grows downwards.
    assert abs(places["b"] - roof_at(xs["b"])) < 3
    decade = (places["a"] - places["b"]) / 2
    assert abs(places["a"] - decade - roof_at(xs["a"])) < 3
    assert xs["a"] < xs["b"]
    assert roofline([], roofs, "x", "y", "t") == ""
    assert roofline([Point(0, 1, "a"), Point(1, 0, "b")], [], "x", "y", "t") == ""


def test_what_a_store_says_is_text_and_no_markup(tmp_path, monkeypatch):
    """A user's own evidence file may hold anything."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    plan = expand(load_spec("v32_h16")).plans()[0]
    evil = "<script>alert(1)</script>\"'&"
    cases = [
        {
            "case": {"batch": evil},
            "gpu_us": 3.0,
            "tb_per_s": 1.0,
            "tflops_per_s": 5.0,
            "peers": [{"label": evil, "gpu_us": 1}],
        },
        {"case": {"rows": evil, "width": 3}, "gpu_us": "x", "tb_per_s": None, "floor_us": True},
        {"case": 3},
        "text",
        {"case": {}, "gpu_us": 1e400, "tb_per_s": -1.0, "tflops_per_s": 0, "peers": [3, None]},
    ]
    row = row_for(
        render(plan),
        "benchmark",
        device=evil,
        spec="v32_h16",
        toolchain=evil,
        driver=evil,
        figures={"cases": cases[:4]},
    )
    rows = [row, replace(row, spec=evil, date=evil)]
    (tmp_path / "store" / "evidence").mkdir(parents=True)
    (tmp_path / "store" / "evidence" / "x.jsonl").write_text("".join(row.to_line() for row in rows))
    text, checker = page_of(tmp_path, "v32_h16")
    assert "<script" not in text and checker.fetched == []
    assert evil in "".join(checker.text)
    assert json.loads(rows[0].to_line())["figures"]["cases"][2] == {"case": 3}


def test_the_shared_memory_map_is_to_scale():
    plan = expand(load_spec("v32_h16")).plans()[0]
    boxes = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', memory_map(plan))
    assert len(boxes) == len(plan.smem)
    for (x, width), field in zip(boxes, plan.smem, strict=True):
        assert abs(float(x) - field.offset_bytes / plan.smem_bytes * WIDTH) < 0.01
        assert abs(float(width) - max(1.0, field.size_bytes / plan.smem_bytes * WIDTH)) < 0.01
    assert memory_map(expand(load_spec("v32_h16")).plans()[1]) == ""


def test_a_multiprocessor_is_drawn_with_what_bounds_it():
    plan = expand(load_spec("v32_h16")).plans()[0]
    lines = occupancy_lines(plan)
    assert lines[-1] == "1 block at once, bounded by shared memory and registers"
    assert "640 of 2048" in lines[2] and "|##########  " in lines[2] and "room for 3" in lines[2]
    for name in shipped_specs():
        for plan in expand(load_spec(name)).plans():
            count = resident_ctas(plan)
            assert all(count * use.per_block <= use.per_sm for use in resources(plan))
            assert any((count + 1) * use.per_block > use.per_sm for use in resources(plan))


def test_registers_are_drawn_by_role_where_they_move():
    lines = register_lines(expand(load_spec("v32_h16")).plans()[0])
    assert [line.split("  ")[0] for line in lines] == ["value", "score", "producer"]
    assert lines[0].endswith("8 warps x 32 x 104 = 26624") and "|############## " in lines[0]
    moving = 0
    for name in shipped_specs():
        for plan in expand(load_spec(name)).plans():
            shares = register_shares(plan)
            moving += bool(shares)
            assert bool(shares) is plan.moves_registers
            if shares:
                assert sum(warps for _, warps, _ in shares) == plan.threads // 32
                assert (
                    sum(32 * warps * registers for _, warps, registers in shares) <= plan.threads * plan.registers_cap
                )
    assert moving >= 5


def test_the_pipeline_is_the_bodys_own_drawing(capsys):
    for name in shipped_specs():
        for plan in expand(load_spec(name)).plans():
            assert pipeline_lines(plan), plan.slug
    assert main(["explain", "v32_h16"]) == 0
    out = capsys.readouterr().out
    assert "    time ->   producers  | wait freed" in out and "\n  pipeline\n" in out and H200.device not in out


@pytest.mark.parametrize("options", [["--json"], ["--batch", "3"]])
def test_a_page_is_of_the_plans_alone(tmp_path, capsys, options):
    assert main(["explain", "v32_h16", "--html", str(tmp_path / "x"), *options]) == 2
    assert "leave out --batch and --json" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["missing/page.html", ".", "x" * 5000])
def test_a_page_that_cannot_be_written_is_bad_input(tmp_path, capsys, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "v32_h16", "--html", place]) == 3
    assert "error: --html" in capsys.readouterr().err
