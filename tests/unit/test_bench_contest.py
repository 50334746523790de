"""The benchmark of the contest's kernels without a device: groups, rules that are kept, figures."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dsagen
from dsagen.bench import contest_data as contest
from dsagen.bench import contest_run, sweep
from dsagen.bench.contest_run import SPECS, ContestFigures, ContestGroup, contest_groups, sweep_contest
from dsagen.bench.timing import Timing
from dsagen.cli.measuring import bench
from dsagen.cli.page import _case_name
from dsagen.errors import SpecError
from dsagen.matrix import expand
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

FIGURES = ContestFigures(SPECS[0], ("s",), "NVIDIA H200", "sm_90a", "33 to 45 pages", 39, 7.5, 5.0, 9.0)
GROUPS = {
    SPECS[0]: (
        ContestGroup("whole", (contest.IndexerWorkload((5, 90), 2),)),
        ContestGroup("scored", (contest.IndexerWorkload((9, 2070), 33), contest.IndexerWorkload((40,), 33))),
    ),
    SPECS[1]: (ContestGroup("few", (contest.AttentionWorkload((30, 7)),)),),
}


def test_groups_have_every_workload():
    assert [(g.name[:14], len(g.workloads)) for g in contest_groups(SPECS[0])] == [
        ("up to 32 pages", 69), ("33 to 45 pages", 39), ("82 to 91 pages", 20)
    ]  # fmt: skip
    assert sum(len(g.workloads) for g in contest_groups(SPECS[1])) == 23


def test_figures_are_plain_data_and_a_row():
    document = json.loads(json.dumps(FIGURES.to_json(), allow_nan=False))
    assert (document["gpu_us"], document["case"]["workloads"]) == (7.5, 39)
    assert len(FIGURES.cells()) == len(FIGURES.header) and FIGURES.title == "39 workloads: 33 to 45 pages"
    assert replace(FIGURES, record_us=7.0).slower and not FIGURES.slower and FIGURES.missed == ()
    assert _case_name(document) == FIGURES.title
    plans = expand(load_spec(SPECS[0])).plans()
    assert [replace(FIGURES, slugs=(plans[0].slug,)).took_part(plan) for plan in plans][:2] == [True, False]


@pytest.fixture
def emulated(shared_store, shared_machine, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(contest_run, "input_sets_for", lambda *_, **__: 1)
    times = iter(range(1, 99))

    def timed(calls):
        for call in calls:
            call()
        return Timing(float(next(times)), 0.0, len(calls), 1)

    monkeypatch.setattr(contest_run, "graph_time_us", timed)
    load, options = dsagen.load, EmulatorOptions(races=False)
    monkeypatch.setattr(dsagen, "load", lambda spec: load(spec, device="emulator", emulator=options))


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_workloads_are_held_to_the_rules_and_timed(name, emulated, monkeypatch):
    said: list[str] = []
    known = {contest_run.case_key({"contest": name, "group": GROUPS[name][0].name, "workloads": 1}): 1.5}
    options = {"seed": 1, "records": known, "progress": said.append, "groups": GROUPS[name], "pages": 40}
    figures = sweep_contest(load_spec(name), wrong=pytest.fail, **options)
    if name == SPECS[0]:
        assert [(f.group, f.workloads, f.gpu_us) for f in figures] == [
            ("whole", 1, 1.0), ("scored", 2, 2.5), ("all", 3, 2.0)
        ]  # fmt: skip
        assert (figures[1].least_us, figures[1].most_us, figures[0].record_us) == (2.0, 3.0, 1.5)
        assert {slug.split("-")[0] for slug in figures[0].slugs} == {"topk"}
        assert {slug.split("-")[0] for slug in figures[2].slugs} == {"topk", "indexer_logits"}
    else:
        assert [(f.group, f.slugs[0].split("-")[0]) for f in figures] == [("few", "sparse_decode")]
    assert len(said) == len(GROUPS[name])
    wrong: list[str] = []
    kind = contest_run._Attention if name == SPECS[1] else contest_run._Indexer
    monkeypatch.setattr(kind, "problem", lambda *_: "broken")
    assert sweep_contest(load_spec(name), wrong=wrong.append, **options) == []
    assert wrong[0].endswith("workload 0: broken; it was not timed") and len(wrong) == len(GROUPS[name])


def test_the_sweep_takes_the_contest_s_specs_alone(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(contest_run, "sweep_contest", lambda spec, **_: asked.append(spec.name) or [])
    sweep.run_sweep([load_spec(name) for name in SPECS], only="contest")
    assert tuple(asked) == SPECS
    with pytest.raises(SpecError, match="v32_h16: the contest is of contest_indexer_h64 and contest_attention_h16"):
        sweep.run_sweep([load_spec("v32_h16")], only="contest")
    (option,) = (option for option in bench.params if option.name == "op")
    assert set(option.type.choices) == set(sweep.MEASURED)
