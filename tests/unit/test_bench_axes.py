"""A sweep by data, and figures as pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsagen.bench.axes import SweepAxes, parse_values
from dsagen.bench.cases import BATCHES, decode_cases
from dsagen.bench.data import DecodeCase
from dsagen.bench.figures import DecodeFigures, PeerFigure
from dsagen.bench.plots import write_plots
from dsagen.cli import main
from dsagen.errors import SpecError
from dsagen.spec import load_spec

SLUG = "sparse_decode-main-mma_sync-sm_90a-kv.v32-dqk.576-dv.512-n.16-smem.227"


def test_axes_replace_what_they_name() -> None:
    cases = decode_cases(load_spec("v32_h16"))
    assert SweepAxes().cases(cases) == cases and not SweepAxes()
    swept = SweepAxes(batch=(2, 8), topk=(64, 512)).cases(cases)
    assert [(case.batch, case.topk) for case in swept] == [(2, 64), (2, 512), (8, 64), (8, 512)]
    assert {(case.s_q, case.kv_tokens, case.heads) for case in swept} == {(1, cases[0].kv_tokens, 16)}
    by_query = SweepAxes(s_q=(2,)).cases(cases)
    assert [(case.batch, case.s_q) for case in by_query] == [(batch, 2) for batch in BATCHES]
    with pytest.raises(SpecError, match="topk 99999"):
        SweepAxes(topk=(99999,)).cases(cases)


def test_axes_of_a_spec_make_specs() -> None:
    spec = load_spec("v32_h16")
    assert SweepAxes(batch=(1,)).specs(spec) == [spec]
    made = SweepAxes(heads=(8, 24), kv=("v32", "bf16")).specs(spec)
    assert [(one.heads, one.kv.format_id) for one in made] == [(8, "v32"), (8, "bf16"), (24, "v32"), (24, "bf16")]
    assert len({one.name for one in made}) == 4
    with pytest.raises(SpecError, match="heads"):
        SweepAxes(heads=(500,)).specs(spec)


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "1.5", "two", "1;2", "¹"])
def test_values_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"--batch .* is no whole number of 1 or more"):
        parse_values("--batch", text)


def test_values() -> None:
    assert parse_values("--batch", None) == ()
    assert parse_values("--batch", "1, 4,4,16") == (1, 4, 16)


def test_active_sms_are_bounded_by_the_devices() -> None:
    case = DecodeCase("v32", 16, 128, 1, 2048, 32768, 64)
    for ctas, expected in ((32, 32), (512, 132)):
        figures = DecodeFigures("v32_h16", SLUG, "NVIDIA H200", case, 1, ctas, 75.0, 0.01, 2, 4.0, 80.0, 40.0)
        assert figures.active_sms == expected == figures.to_json()["active_sms"]
        assert figures.cells()[figures.header.index("SMs")] == str(expected)
    other = DecodeFigures("v32_h16", SLUG, "NVIDIA H100", case, 1, 32, 75.0, 0.01, 2, 4.0, 80.0, None)
    assert other.active_sms is None and other.cells()[other.header.index("SMs")] == "-"


def recorded() -> list[dict[str, object]]:
    peers = (PeerFigure("peer", "peer, padded", "1", 90.0), PeerFigure("other", "other", "", None, "refused"))
    cases = []
    for spec, heads in (("v32_h16", 16), ("v32_h64", 64)):
        for batch in (1, 16):
            case = DecodeCase("v32", heads, batch, 1, 2048, 32768, 64)
            found = DecodeFigures(spec, SLUG, "NVIDIA H200", case, 1, 32, 10.0 * batch, 0.01, 2, 4.0, 80.0, 1.0, peers)
            cases.append(json.loads(json.dumps(found.to_json())))
    selection = {"rows": 4, "width": 4096, "k": 64, "mode": "set", "score": "fp32", "page_size": 64}
    common = {"device": "NVIDIA H200", "floor_us": 0.1, "gpu_us": 3.0, "issue_us": 5.0, "peers": []}
    # Of steps, which have a KV format too, and of what has no floor there is a line in the table.
    step = {"kv_format": "v32", "heads": 16, "requests": 4, "context": 4096}
    contest = {"spec": "contest_indexer_h64", "device": "NVIDIA H200", "gpu_us": 3.0, "case": {"contest": "x"}}
    others = [{"spec": "v32_decode_h16", "case": step, **common}, contest]
    return [*cases, {"spec": "v32_topk_h128", "case": selection, **common}, *others]


def test_pictures_and_a_page_that_shows_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, *pictures = write_plots(recorded(), tmp_path / "plots")
    names = {path.name for path in pictures}
    assert names == {
        "v32_h16.us.png",
        "v32_h64.us.png",
        "sparse_decode.floor.png",
        "sparse_decode.roofline.png",
        "v32_topk_h128.topk.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in pictures)
    text = page.read_text()
    assert all(f"src='{name}'" in text for name in names)
    assert text.count("<tr>") == 1 + len(recorded())


def test_without_matplotlib_or_figures_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="nothing to draw"):
        write_plots([], tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecError, match=r"pip install 'dsagen\[plots\]'"):
        write_plots(recorded(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v32_h16", "--recorded"], "add --plot FOLDER or --json"),
        (["v32_h16", "--recorded", "--peers", "--json"], "--peers: means nothing beside --recorded"),
        (["v32_h16", "--host", "--peers"], "--peers: means nothing beside --host"),
        (["v32_h16", "--host", "--recorded"], "--recorded: means nothing beside --host"),
        (["v32_topk_h128", "--batch", "1"], "a sweep is of sparse_decode, which its ops lack"),
        (["v32_h16", "--batch", "x"], "--batch 'x'"),
        (["v32_h16", "--kv", "v99"], "v99"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
