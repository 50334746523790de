"""The cache family: its cells, what its plans hold, and which rules write which formats."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsagen.arch import ARCHS, arch
from dsagen.cli.app import cli
from dsagen.dtype import E2M1, E4M3
from dsagen.errors import GuardError, SpecError
from dsagen.families import kv_cache
from dsagen.families.kv_cache.family import BODY, FAMILY, NAME, cache_axes
from dsagen.families.kv_cache.geometry import moved_bytes, other_layout, scale_pad_bytes
from dsagen.families.kv_cache.op import RowsShape, row_traffic_bytes
from dsagen.kv_format import KV_FORMATS, KvFormat, Layout, ScaleKind, kv_format
from dsagen.kv_rule import COPY, WRITE_RULES, default_rule, rules_of, write_rule
from dsagen.matrix import expand
from dsagen.plan import Variant
from dsagen.render import render
from dsagen.spec import load_spec, shipped_specs

FORMATS = pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
SPEC = {"model": "v41", "heads": 16, "archs": list(ARCHS), "ops": ["kv_cache"]}
# Rows that caches hold and no kernel attends to.
NARROW = {
    "name": "narrow",
    "model": "custom",
    "kv": "bf16",
    "dims": {"d_qk": 192, "d_v": 64},
    "topk": 64,
    "heads": 16,
    "archs": ["sm_90a"],
    "kv_write": {"rule": "copy", "rows": "bf16"},
}


def test_each_cache_has_a_writer_a_reader_and_where_there_are_two_layouts_a_converter() -> None:
    matrix = expand(load_spec(SPEC))
    matrix.require_complete()
    roles = ["write", "read", "convert", "write_extra", "read_extra", "convert_extra"]
    assert [(cell.arch, cell.role) for cell in matrix.cells] == [(name, role) for name in ARCHS for role in roles]
    one = expand(load_spec({**SPEC, "model": "v32", "archs": ["sm_90a"]}))
    assert [cell.role for cell in one.cells] == ["write", "read"]


def test_caches_of_one_format_share_their_kernels() -> None:
    matrix = expand(load_spec({**SPEC, "model": "v4", "archs": ["sm_90a"]}))
    assert [cell.role for cell in matrix.cells] == ["write", "read", "write_extra", "read_extra"]
    assert len(matrix.plans()) == 2


def test_heads_and_capacity_need_no_kernel_of_their_own() -> None:
    plans = {expand(load_spec({**SPEC, "heads": h, "topk": k})).plans() for h in (8, 128) for k in (1, 4096)}
    assert len(plans) == 1


def test_other_ops_of_a_spec_keep_their_kernels() -> None:
    both = expand(load_spec({**SPEC, "model": "v32", "ops": ["sparse_decode", "kv_cache"]}))
    alone = expand(load_spec({**SPEC, "model": "v32", "ops": ["sparse_decode"]}))
    assert set(alone.cells) <= set(both.cells)
    # What one op cannot build does not hide behind another that it can.
    with pytest.raises(SpecError, match=r"narrow: not everything .*\n  sparse_decode on sm_90a: .*d_v 64"):
        expand(load_spec({**NARROW, "ops": ["kv_cache", "sparse_decode"]})).require_complete()


@FORMATS
@pytest.mark.parametrize("name", ARCHS)
def test_every_plan_holds_and_says_so_in_its_unit(record: KvFormat, name: str) -> None:
    for role, axes in cache_axes(record, default_rule(record), "bf16"):
        plan = FAMILY.plan(Variant(NAME, role, BODY, name, axes))
        text = render(plan).text
        assert plan.symbol in text
        assert [g.guard_id for g in plan.guards] == (
            ["K-02", "KV-01"] if role == "convert" else ["K-02", "KV-01", "KV-02"]
        )
        for guard in plan.guards:
            assert f'static_assert({guard.c_expression}, "[{guard.guard_id}] {guard.expression}");' in text
        assert plan.threads * plan.registers_cap * plan.min_blocks_per_sm <= arch(name).registers_per_sm


def test_a_format_whose_groups_no_warp_holds_is_refused_with_the_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = dataclasses.replace(kv_format("v41_interleaved"), scale_group_dims=96)
    monkeypatch.setattr("dsagen.families.kv_cache.family.kv_format", lambda _: odd)
    variant = Variant(NAME, "read", BODY, "sm_90a", (("kv", "v41_interleaved"),))
    with pytest.raises(GuardError, match=r"^\[KV-02\] 512 dims in groups of 96: .* \(kv_cache-read-.*\)$"):
        FAMILY.plan(variant)


@FORMATS
def test_rules_are_those_whose_scales_the_format_holds(record: KvFormat) -> None:
    rules = rules_of(record)
    assert default_rule(record) in rules
    if not record.scale_groups:
        assert rules == (COPY,) and write_rule(record, COPY) is None
        return
    values = record.segment("values").element
    for rule in WRITE_RULES.values():
        fits = rule.values is values and record.scale_kind in rule.scale_kinds
        assert (rule.rule_id in rules) == fits
    with pytest.raises(SpecError, match=f"format {record.format_id} is not written by it: allowed are"):
        write_rule(record, "nonsense")


def test_the_readme_tells_every_rule_and_the_defaults() -> None:
    text = (Path(kv_cache.__file__).parent / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", text, re.MULTILINE))
    assert list(rows) == [*WRITE_RULES, COPY]
    defaults = {default_rule(record) for record in KV_FORMATS.values() if len(rules_of(record)) > 1}
    assert {rule for rule, engines in rows.items() if "the default" in engines} == defaults


def test_which_rules_serve_which_formats() -> None:
    raw = ("normal_floor", "normal_floor_reciprocal", "amax_floor", "amax_floor_multiply")
    powers = ("pow2_scale_floor", "pow2_amax_floor")
    assert rules_of(kv_format("v32")) == (*raw, *powers) == rules_of(kv_format("v32_nope"))
    assert rules_of(kv_format("v32_pow2")) == powers == rules_of(kv_format("v4"))
    assert rules_of(kv_format("v41_page_split")) == powers
    assert rules_of(kv_format("v41_fp4_interleaved")) == ("e4m3_scale_floor",)
    assert {default_rule(kv_format(name)) for name in ("v32", "v32_nope")} == {"normal_floor"}
    assert default_rule(kv_format("v4")) == "pow2_amax_floor"
    assert {default_rule(kv_format(name)) for name in ("v32_pow2", "v41_interleaved")} == {"pow2_scale_floor"}
    assert (WRITE_RULES["amax_floor"].most, WRITE_RULES["e4m3_scale_floor"].most) == (448.0, 6.0)
    assert {rule.values for rule in WRITE_RULES.values()} == {E4M3, E2M1}


def test_layouts_come_in_pairs() -> None:
    pairs = {record.format_id: getattr(other_layout(record), "format_id", None) for record in KV_FORMATS.values()}
    assert {a: b for a, b in pairs.items() if b} == {
        "v41_interleaved": "v41_page_split",
        "v41_page_split": "v41_interleaved",
        "v41_fp4_interleaved": "v41_fp4_page_split",
        "v41_fp4_page_split": "v41_fp4_interleaved",
    }


def test_traffic_counts_each_byte_of_a_record_and_of_its_row_once() -> None:
    for record in KV_FORMATS.values():
        assert moved_bytes(record, 1000) == record.record_bytes + 1000
    assert {r.format_id: scale_pad_bytes(r) for r in KV_FORMATS.values() if scale_pad_bytes(r)} == {"v4": 1}
    plans = {plan.variant.kernel: plan for plan in expand(load_spec({**SPEC, "archs": ["sm_90a"]})).plans()[:3]}
    traffic = {role: row_traffic_bytes(plan) for role, plan in plans.items()}
    assert traffic == {"write": 528 + 1024, "read": 528 + 1024, "convert": 2 * 528}
    for plan in plans.values():
        assert dict(plan.budget)["floor"] == f"{row_traffic_bytes(plan)} B of memory traffic a row"
    assert [RowsShape(rows).blocks for rows in (0, 1, 4, 5, 2**31 - 1)] == [0, 1, 1, 2, 2**29]


def test_explain_tells_kernels_and_calls() -> None:
    kernels = CliRunner().invoke(cli, ["explain", "v41_kv_cache_h64"]).output
    assert "bf16 rows by pow2_scale_floor and e4m3_scale_floor" in kernels
    for text in (
        "grid of ceil(rows / 4) blocks, 128 threads each",
        "[KV-07]  row_stride_bytes ==",
        "0 B of dynamic",
    ):
        assert kernels.count(text) == 6
    calls = CliRunner().invoke(cli, ["explain", "v4_kv_cache_h64", "--batch", "100", "--s-q", "2"]).output
    assert calls.startswith("v4_kv_cache_h64 on sm_90a\nshape: 200 rows\n")
    assert "  grid: 50 CTAs, a warp a row; 321600 B of traffic, 0.07 us at the least; workspace: 0 B\n" in calls


def test_the_shipped_specs_cover_both_layouts_and_every_scale_kind() -> None:
    specs = [load_spec(name) for name in shipped_specs() if "_kv_cache_h" in name]
    records = {r for spec in specs for r in (spec.kv_format, spec.extra_kv_format) if r is not None}
    assert {r.scale_kind for r in records} == {ScaleKind.FP32, ScaleKind.UE8M0, ScaleKind.E4M3}
    assert {r.layout for r in records} == set(Layout) and len(records) == 7
    for spec in specs:
        expand(spec.replace(archs=list(ARCHS))).require_complete()
