"""Which body of the indexer's logits a spec gets, by its accumulation, keys, forms and arch, and how that is told."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dsagen import knobs
from dsagen.arch import ARCHS, arch
from dsagen.cli.app import cli
from dsagen.compat.contest import INDEXER
from dsagen.compat.deployments import Indexers, LogitsNeed
from dsagen.errors import KnobError
from dsagen.families.indexer_logits import hopper
from dsagen.families.indexer_logits.bodies import PORTABLE, choose_body
from dsagen.index_format import INDEX_FORMATS
from dsagen.matrix import expand
from dsagen.spec import DeploymentSpec, IndexSpec, load_spec

KNOB = "DSAGEN_INDEXER_LOGITS_BODY"
FORMS = ["paged", "blocks", "ragged", "candidates"]
FAST, FP32 = {"accumulation": "fast"}, {"accumulation": "fp32"}


def spec_of(arch_name: str = "sm_90a", **index: object) -> DeploymentSpec:
    spec = {"model": "v32", "heads": 16, "archs": [arch_name], "ops": ["indexer_logits"]}
    return load_spec({**spec, "index": {"forms": FORMS, **index}})


def hopper_forms(spec: DeploymentSpec) -> list[str]:
    """The forms of keys whose kernel has the hopper body; all others have the portable one."""
    bodies = [cell.variant.body for cell in expand(spec).cells if cell.variant is not None]
    assert spec.index is not None and len(bodies) == len(spec.index.forms) and {*bodies} <= {PORTABLE, hopper.BODY}
    return [form for form, body in zip(spec.index.forms, bodies, strict=True) if body == hopper.BODY]


def test_the_knob_has_the_family_s_bodies() -> None:
    assert (PORTABLE, hopper.BODY) == knobs.BODIES


@pytest.mark.parametrize(
    ("keys", "accumulation", "expected"),
    [
        ("fp8", {}, []),
        ("fp8", FP32, []),
        ("fp8", FAST, ["paged", "blocks", "ragged"]),
        # Sums of scaled blocks are fp32 in either body.
        ("mxfp8", {}, ["paged", "blocks"]),
        ("mxfp8", FAST, ["paged", "blocks"]),
        ("mxfp4", FP32, ["paged", "blocks"]),
    ],
)
def test_a_spec_gets_hopper_where_it_takes_its_sums(
    keys: str, accumulation: dict[str, str], expected: list[str]
) -> None:
    assert hopper_forms(spec_of(keys=keys, **accumulation)) == expected


@pytest.mark.parametrize("name", [name for name in ARCHS if name != "sm_90a"])
@pytest.mark.parametrize("asked", ["", "hopper"])
def test_other_archs_have_one_body(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KNOB, asked)
    for keys in INDEX_FORMATS:
        assert hopper_forms(spec_of(name, keys=keys, **FAST)) == []


@pytest.mark.parametrize(("asked", "expected"), [("mma_sync", []), ("hopper", ["paged", "blocks", "ragged"])])
@pytest.mark.parametrize("accumulation", [FP32, FAST])
def test_the_knob_asks_for_either_body_whatever_the_spec_takes(
    asked: str, expected: list[str], accumulation: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KNOB, asked)
    assert hopper_forms(spec_of(**accumulation)) == expected
    assert hopper_forms(spec_of(keys="mxfp4", **accumulation)) == expected[:2]


def test_the_knob_names_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KNOB, "wgmma")
    with pytest.raises(KnobError, match=f"{KNOB}='wgmma': expected one of mma_sync, hopper"):
        expand(spec_of())


def test_each_choice_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(form: str = "paged", arch_name: str = "sm_90a", **index: str) -> str:
        return choose_body(
            IndexSpec.model_validate({"heads": 64, "dim": 128, "keys": "fp8", **index}), form, arch(arch_name)
        ).why

    assert why() == "index.accumulation: fp32 takes no sums of e4m3 products; fast would take hopper"
    assert why(**FAST) == "index.accumulation: fast takes its sums"
    assert why(keys="mxfp4") == "its sums of mxfp4 keys are fp32"
    assert why("ragged", keys="mxfp8", **FAST) == "the only one for mxfp8 keys in form ragged on sm_90a"
    assert why(arch_name="sm_100a", **FAST) == "the only one for fp8 keys in form paged on sm_100a"
    monkeypatch.setenv(KNOB, "mma_sync")
    assert why(**FAST) == f"{KNOB} asks for it"


def test_the_reason_is_told() -> None:
    def told(*words: str) -> str:
        return CliRunner().invoke(cli, list(words)).output

    reason = "index.accumulation: fast takes its sums"
    assert f"  body\n    hopper: {reason}\n" in told("explain", "v32_indexer_h128")
    assert f"\nbody: hopper: {reason}\n" in told("explain", "v32_indexer_h128", "--batch", "1", "--width", "64")
    assert f"score.fp32-smem.227  ({reason})\n" in told("list", "v32_indexer_h128")
    assert f'"why": "{reason}"' in told("explain", "v32_indexer_h128", "--json")
    # Of an op without a choice nothing is told.
    assert "  body\n" not in told("explain", "v32_topk_h128")


def test_drop_ins_have_the_sums_of_what_they_stand_for_and_take_kernels_with_any() -> None:
    need = LogitsNeed(64, 128, "fp8", "fp32", "ragged")
    derived = Indexers().derive(need, "sm_90a")
    assert hopper_forms(derived) == ["ragged"]
    exact = derived.replace(index={**derived.to_mapping()["index"], **FP32})
    assert Indexers().serves(derived, need) and Indexers().serves(exact, need)
    contest = load_spec("contest_indexer_h64")
    assert INDEXER.serves(contest, None) and INDEXER.serves(contest.replace(index=FP32), None)
    assert not INDEXER.serves(contest.replace(index={"heads": 32, **FAST}), None)
    assert not INDEXER.serves(contest.replace(ops=["topk"], index=None), None)
