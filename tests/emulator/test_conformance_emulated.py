"""The quick tier of `dsagen check`, unchanged, on the emulator: all families, a kernel of each structure.

Cases run with different orders of warps, each always with the same. What needs a CUDA device, and what is beyond the
emulator's declared size, counts as skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from dsagen import knobs
from dsagen.check import run as check_run
from dsagen.check.cases import DecodeCase
from dsagen.check.place import Case, emulator_place
from dsagen.check.run import KernelCache, cases_of, run_case, run_check
from dsagen.errors import CheckFailed
from dsagen.families.sparse_decode import family as sparse_decode
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.runtime import api
from dsagen.runtime.emulated import EmulatedCode, EmulatorOptions, read_ptx
from dsagen.spec import DeploymentSpec, load_spec

pytestmark = pytest.mark.compile

SEEDS = 4
# Repeats, which are equal by construction where the order of warps is; the most splits and rows: one suite runs such.
SLOW = r"logits\.(repeated|shape\.width5000|window\.many.*)"
SLOW += r"|run\.repeated(\.splits5)?|splits\.300|topk\.repeated\..*|topk\.layout\.rows(1025.*|133\..*)"


@dataclass(frozen=True)
class Suite:
    """A spec as one arch, with what it changes of a shipped one; `only` matches the cases that run, `but` not them.

    `body` is that of sparse decode, by default what specs get.
    """

    name: str
    spec: str
    arch: str
    only: str = r".*"
    but: str = SLOW
    changes: Mapping[str, Any] = field(default_factory=dict)
    body: str = ""

    def load(self) -> DeploymentSpec:
        return load_spec(self.spec).replace(archs=[self.arch], **self.changes)

    def plans(self) -> tuple[KernelPlan, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(BODY_KNOB, self.body)
            return expand(self.load()).plans()

    def cases(self) -> tuple[Case, ...]:
        every = cases_of(self.load(), self.arch, "quick")
        return tuple(c for c in every if re.fullmatch(self.only, c.name) and not re.fullmatch(self.but, c.name))


# A second cache is in three of four cases.
TWO_CACHES = r"extra\..*|values\..*|page\.(1|5|61|256)|splits\.[1-7].*|ids\.[ol].*"
CORE = r"ids\..*|values\..*|splits\.[1-7].*|width\..*|lse\..*|run\..*"
# In order, and some without; of the long rows that each body takes, one that fits its list and one that does not.
TOPK_CORE = (
    r"topk\.(data\.\w*\.k512(\.drop)?|data\.(normal|two_values)\.k512\.set|digit\.\w*\.\w*|(ids|width|window|graph|permuted|alone|layout|most_slots)(\.\w*)?"
    r"|body\.\w*\.(normal|low_21_bits))"
)
STEP_CORE = (
    r"step\.(lengths\.(edges|beyond)|contents\.normal|page\.(5|5\.kv64)|next_n\d\.per_request|k\d+|splits|layers"
    r"|apart|graph)"
)
STEP_CANDIDATES = (
    r"step\.candidates\.(lengths\.(edges|beyond.*|per_request)|contents\.normal|page\..*|blocks(1|5|60)|k\d+|splits"
    r"|layers|apart)"
)
STEP_V41: Mapping[str, Any] = {
    "ops": ["indexer_logits", "topk", "sparse_decode"],
    "index": {"heads": 32, "dim": 128, "keys": "fp8"},
}
RAGGED_CORE = (
    r"ragged\.(contents\.special|window\.(beyond|edges\.compressed\.fill|many)|unscored\.150|place\.strided|shape\.heads24"
    r"|graph|alone)"
)
CANDIDATES_CORE = (
    r"blocks\.(contents\.special|length\.unscored|place\.wild|graph)|candidates\.(contents\.(special|large)|list\.(wild\.block16|many)|length\.beyond|place\.(strided|wild)"
    r"|shape\.(heads24|slots9)|graph|alone)"
)
FP32_SUMS: Mapping[str, Any] = {"index": {"heads": 64, "dim": 128, "keys": "fp8", "accumulation": "fp32"}}
# Of sparse decode, and what takes its place on sm_90a for few heads.
BODY_KNOB, PORTABLE = knobs.SPARSE_DECODE_BODY.name, sparse_decode.BODY
SMALL_GQA: Mapping[str, Any] = {"heads": 8, "kv_heads": 2}


def kv_heads(kv: str, heads: int) -> Mapping[str, Any]:
    """Two KV heads of a format, with a second cache of the same, or FP4 beside V4.1's FP8, where models have one."""
    extra = {"v4": "v4", "v41": "v41_fp4"}.get(kv)
    second = "none" if extra is None else {"format": extra, "topk": 512}
    return {"heads": heads, "kv": kv, "extra_kv": second, "dims": {}}


COUNTED = "step-counted"
SUITES = (
    Suite("v32-sm_90a", "v32_h16", "sm_90a", but=r"run\.repeated"),
    # Copies of 16 bytes a thread instead of bulk ones; codes that are shifted instead of converted.
    Suite("v32-sm_80", "v32_h16", "sm_80"),
    # The former with the conversion; the newest arch; the shared memory of small ones.
    Suite("v32-sm_89", "v32_h16", "sm_89", r"values\..*"),
    Suite("v32-sm_100a", "v32_h16", "sm_100a", r"values\..*"),
    Suite("bf16-sm_90a", "v32_h16", "sm_90a", CORE, changes={"kv": "bf16"}, body=PORTABLE),
    # Of few heads on this arch, where a table may name it.
    Suite("v32-portable", "v32_h16", "sm_90a", r"values\.[mrn].*|splits\.3.*", body=PORTABLE),
    Suite("v41-portable", "v41_h16", "sm_90a", r"values\.[mw].*|extra\.(lengths|splits\.3)", body=PORTABLE),
    Suite("bf16-sm_80", "v32_h16", "sm_80", r"values\..*", changes={"kv": "bf16"}),
    # Other numbers of heads a CTA: the least, one that fills no tile, the most, two groups of the most.
    Suite("v32-h8", "v32_h8", "sm_90a", r"width\..*"),
    Suite("v32-h24", "v32_h16", "sm_90a", r"ids\..*", changes={"heads": 24}),
    Suite("v32-h64", "v32_h64", "sm_90a", r"values\..*"),
    Suite("v32-h128", "v32_h128", "sm_90a", r"splits\.[2-4].*|ids\.one_valid.*"),
    # Every other encoding and placement of rows, the oldest instructions and the least shared memory among them.
    Suite("v32_nope-sm_90a", "glm5_nope_h16", "sm_90a", r"values\..*|page\.(5|61)"),
    Suite("v4-sm_90a", "v4_h16", "sm_90a", TWO_CACHES),
    Suite("v4-sm_80", "v4_h16", "sm_80", r"values\..*|extra\.(lengths|splits.*)"),
    Suite("v4-h64", "v4_h64", "sm_90a", r"values\..*|extra\.splits\.3"),
    Suite("v41-sm_90a", "v41_h16", "sm_90a", TWO_CACHES),
    Suite("v41-sm_89", "v41_h16", "sm_89", r"values\..*|extra\.(lengths|splits.*)"),
    Suite("v41-h64", "v41_h64", "sm_90a", r"values\.[mw].*|extra\.(splits\.3|ramp.*)"),
    Suite("v41-page_split", "v41_page_split_h64", "sm_90a", r"values\..*|page\.5|extra\..*", changes={"heads": 8}),
    Suite("v41_fp8-h24", "v41_fp8_h16", "sm_90a", r"values\..*", changes={"heads": 24}),
    Suite("v41_fp4-sm_90a", "v41_fp4_h16", "sm_90a", r"(values|ids|page)\..*"),
    Suite("v41_fp4-sm_80", "v41_fp4_page_split_h16", "sm_80", r"values\..*|page\.(2|5)"),
    Suite("v41_fp4-h64", "v41_fp4_h16", "sm_90a", r"values\..*", changes={"heads": 64}),
    Suite("fp16-sm_90a", "v32_fp16_h16", "sm_90a", r"values\..*"),
    Suite("bf16_split-sm_90a", "contest_attention_h16", "sm_90a", r"(values|page|lse)\..*"),
    Suite("bf16_split-sm_80", "contest_attention_h16", "sm_80", r"values\..*", changes={"heads": 8}),
    # Several KV heads: of latents, of keys and values apart, with parts elsewhere, two formats, several groups each.
    Suite("gla-sm_90a", "gla_h64", "sm_90a", r"(page\.(1|5|61)|ids\.o|extra).*", changes={"heads": 8}),
    Suite(
        "gqa-sm_90a", "gqa_h64", "sm_90a", r"values\.[mrn].*|page\.(1|61)|splits\.[23]|lse.base_2.*", changes=SMALL_GQA
    ),
    Suite("gqa-sm_80", "gqa_h64", "sm_80", r"values\.[mn].*|page\.69", changes={**SMALL_GQA, "kv": "fp16_kv"}),
    Suite("v4-kv_heads", "gla_h64", "sm_90a", r"extra\.(lengths|splits\.3)|page\.5", changes=kv_heads("v4", 4)),
    Suite("v41-kv_heads", "gla_h64", "sm_89", r"extra\.(lengths|splits\.3)|page\.5", changes=kv_heads("v41", 6)),
    Suite("split-kv_heads", "gla_h64", "sm_90a", r"page\.(1|5)", changes=kv_heads("bf16_split", 4)),
    Suite("v32-kv_heads", "gla_h64", "sm_86", r"splits\.3", changes=kv_heads("v32", 128)),
    Suite("topk-fp32-sm_90a", "v32_topk_h128", "sm_90a", TOPK_CORE),
    Suite("topk-fp32-sm_80", "v32_topk_h128", "sm_80", r"topk\.(data\..*\.k512|width\..*)"),
    Suite(
        "topk-bf16-sm_90a", "v32_topk_h128", "sm_90a", r"topk\.(data\..*\.k512|width\..*)", changes={"scores": "bf16"}
    ),
    Suite("topk-bf16-sm_80", "v32_topk_h128", "sm_80", r"topk\.(data\.\w*\.k512|ids\.\w*)", changes={"scores": "bf16"}),
    # The hopper body, one kernel of as many heads as the spec has, and the portable one, whose heads are an argument.
    Suite("logits-sm_90a", "v32_indexer_h128", "sm_90a", but=rf"{SLOW}|logits\.shape\.heads(?!64).*"),
    Suite(
        "logits-fp32",
        "v32_indexer_h128",
        "sm_90a",
        r"logits\.(shape\.heads.*|window\.(beyond|edges).*|place\.strided|unscored.*)",
        changes=FP32_SUMS,
    ),
    Suite("logits-sm_80", "v32_indexer_h128", "sm_80", r"logits\.contents\..*"),
    Suite("index-sm_90a", "v32_index_cache_h128", "sm_90a", but=r"index\.(gather\.repeated|.*page(2|61|256)\..*)"),
    Suite("index-sm_80", "v32_index_cache_h128", "sm_80", r"index\.(write\.[nmztls]|gather\.page5).*"),
    Suite("index-mxfp4-sm_90a", "v4_index_cache_h64", "sm_90a", r"index\.(write\.[nmztls]|.*page(1|64)\.pad).*"),
    Suite("ragged-sm_90a", "v32_indexer_ragged_h128", "sm_90a", RAGGED_CORE),
    Suite(
        "ragged-fp32",
        "v32_indexer_ragged_h128",
        "sm_90a",
        r"ragged\.(window\.(beyond|edges.*fill)|place\.strided|unscored.150)",
        changes={"index": {**FP32_SUMS["index"], "forms": ["ragged"]}},
    ),
    Suite("candidates-sm_90a", "v41_indexer_candidates_h64", "sm_90a", CANDIDATES_CORE),
    Suite(
        "logits-bf16-d64",
        "v32_indexer_h128",
        "sm_90a",
        r"logits\.(contents|place)\..*",
        changes={"scores": "bf16", "index": {"heads": 16, "dim": 64, "keys": "fp8"}},
    ),
    # The chain: one cache and two, keys with scales of blocks, V4.1's candidate blocks.
    Suite("step-sm_90a", "v32_decode_h16", "sm_90a", STEP_CORE),
    Suite(COUNTED, "v32_decode_histogram_h16", "sm_90a", r"step\.counted\.(one_long\.33000|next_n2)"),
    Suite("step-two_caches", "v41_h16", "sm_90a", r"step\.(page\.64\.kv5|splits|lengths\.empty)", changes=STEP_V41),
    Suite("step-v4", "v4_decode_h16", "sm_90a", r"step\.(lengths\.edges|page\.5\.kv64|layers)"),
    Suite("step-v41", "v41_decode_h16", "sm_90a", STEP_CANDIDATES),
)
RUNS = [pytest.param(suite, case, n % SEEDS, id=f"{suite.name}-{case.name}")
        for suite in SUITES for n, case in enumerate(suite.cases())]  # fmt: skip


@cache
def kernels_of(name: str, seed: int) -> KernelCache:
    spec = next(suite for suite in SUITES if suite.name == name).load()
    place = emulator_place(spec, None, EmulatorOptions(seed=seed, threads=1))
    return KernelCache(spec, place.device, place.load)


@pytest.mark.spread
@pytest.mark.parametrize(("suite", "case", "seed"), RUNS)
def test_case(suite: Suite, case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BODY_KNOB, suite.body)
    if suite.name == COUNTED:
        # Rows that clusters hold have no counts.
        monkeypatch.setenv("DSAGEN_TOPK_CLUSTER", "1")
    too_large = emulator_place(suite.load(), None, None).refusal(case)
    if too_large:
        pytest.skip(too_large)
    result, _ = run_case(check_run.RUNS[type(case)](case, kernels_of(suite.name, seed), torch.device("cpu"), 20261))
    if result.status == "not_run":
        pytest.skip(result.problem)
    assert result.status == "passed", result.problem


def test_every_kind_of_the_quick_tier_runs() -> None:
    def kinds(cases: Iterable[Case]) -> set[str]:
        return {".".join(case.name.split(".")[: 1 if case.op == DecodeCase.op else 2]) for case in cases}

    ran = kinds(case for suite in SUITES for case in suite.cases())
    assert ran | {
        "topk.repeated",
        "logits.repeated",
        "step.repeated",
        "ragged.repeated",
        "candidates.repeated",
    } == kinds(
        c
        for suite in SUITES
        if re.fullmatch(
            r"v32-sm_90a|v4-sm_90a|topk-bf16-sm_80|(logits|index|step|ragged|candidates)-sm_90a|step-(v41|counted)",
            suite.name,
        )
        for c in cases_of(suite.load(), suite.arch, "quick")
    )


# ---- a wrong kernel fails the check ---------------------------------------------------------------------------------


def wrong(pattern: str, replacement: str, count: int = 1) -> Any:
    """A reader of PTX in which the first matches of a pattern are replaced, in every kernel that has one."""

    def read(plans: Any) -> dict[str, EmulatedCode]:
        found = {}
        for slug, code in read_ptx(plans).items():
            found[slug] = replace(code, ptx=re.sub(pattern, replacement, code.ptx, count=count, flags=re.MULTILINE))
        return found

    return read


@pytest.mark.parametrize(
    ("name", "only", "pattern", "replacement", "complaint"),
    [
        ("v32_h16", "width.topk1??", r"ex2\.approx\.ftz\.f32|ex2\.approx\.f32", "lg2.approx.f32", r"elements off|nan"),
        (
            "v32_h16",
            "width.topk1??",
            r"^\s*barrier\.sync [^;]*;",
            "",
            r"race|deadlock|barrier|not written|elements off",
        ),
        (
            "v32_topk_h128",
            "topk.data.normal.k512",
            r"^\s*bar(rier)?\.(cta\.)?sync(\.aligned)? [^;]*;",
            "",
            r"race|barrier|not written|expected",
        ),
        ("v32_topk_h128", "topk.width.8192", r"setp\.(gt|ge|lt|le)\.u32", "setp.eq.u32", r"expected|CTA|livelock"),
    ],
)
def test_a_wrong_kernel_fails_the_check(
    name: str, only: str, pattern: str, replacement: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run_check(name, device="emulator", only=only, record=False, seed=5)
    assert right.passed and right.conformant
    count = 0 if "setp" in pattern or "ex2" in pattern else 2
    monkeypatch.setattr(api, "read_ptx", wrong(pattern, replacement, count))
    report = run_check(name, device="emulator", only=only, record=False, seed=5)
    assert report.count("failed") == len(report.results)
    with pytest.raises(CheckFailed, match=complaint):
        report.require_passed()
