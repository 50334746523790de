"""How cache rows are written, which one op reads."""

from __future__ import annotations

import pytest

from dsagen.errors import SpecError
from dsagen.spec import KvWriteSpec, json_schema, load_spec, parse_spec

BASE = "model: v41\nheads: 16\narchs: [sm_90a]\nops: [kv_cache]\n"


def test_every_cache_has_a_rule_where_the_op_reads_it_and_none_elsewhere() -> None:
    spec = parse_spec(BASE)
    assert spec.kv_write == KvWriteSpec(rows="bf16", rule="pow2_scale_floor", extra_rule="e4m3_scale_floor")
    assert spec.to_mapping()["kv_write"] == spec.kv_write.model_dump()
    assert load_spec(spec.to_mapping()) == spec
    one = parse_spec(BASE + "extra_kv: none\n")
    assert one.to_mapping()["kv_write"] == {"rows": "bf16", "rule": "pow2_scale_floor"}
    assert load_spec(one.to_mapping()) == one == parse_spec(one.to_yaml())
    other = parse_spec(BASE.replace("kv_cache", "topk"))
    assert other.kv_write is None and "kv_write" not in other.to_mapping()
    assert parse_spec("model: v32\nheads: 16\narchs: [sm_90a]\nops: [kv_cache]\nkv: bf16\n").kv_write == KvWriteSpec(
        rows="bf16", rule="copy"
    )


def test_what_is_given_stays() -> None:
    spec = parse_spec(BASE + "kv_write: {rows: fp32, rule: pow2_amax_floor}\n")
    assert spec.kv_write == KvWriteSpec(rows="fp32", rule="pow2_amax_floor", extra_rule="e4m3_scale_floor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_write: {rule: normal_floor}", "f.yaml:5: kv_write.rule = 'normal_floor': format v41_interleaved is not "
         "written by it: allowed are pow2_scale_floor, pow2_amax_floor"),
        ("kv_write: {rule: pow2_scale_flor}", "f.yaml:5: kv_write.rule = 'pow2_scale_flor': format v41_interleaved is "
         "not written by it (did you mean pow2_scale_floor?): allowed are pow2_scale_floor, pow2_amax_floor"),
        ("kv_write: {extra_rule: copy}", "f.yaml:5: kv_write.extra_rule = 'copy': format v41_fp4_interleaved is not "
         "written by it: allowed are e4m3_scale_floor"),
        ("kv_write: {rows: fp8}", "f.yaml:5: kv_write.rows = 'fp8': is not allowed: must be 'bf16', 'fp16' or 'fp32' "
         "(did you mean fp32?)"),
        ("kv_write: {row: bf16}", "f.yaml:5: kv_write.row: unknown key (did you mean rows?): allowed are rows, rule, "
         "extra_rule"),
        ("kv_write: bf16", "f.yaml:5: kv_write = 'bf16': must be a mapping with the keys rows, rule, extra_rule"),
        ("kv_write: {rule: 7}", "f.yaml:5: kv_write.rule = 7: is not allowed: input should be a valid string: allowed "
         "are copy, normal_floor, normal_floor_reciprocal, amax_floor, amax_floor_multiply, pow2_scale_floor, "
         "pow2_amax_floor, e4m3_scale_floor"),
        ("kv_write:", "f.yaml:5: kv_write: is empty: leave it out"),
        ("extra_kv: none\nkv_write: {extra_rule: e4m3_scale_floor}", "f.yaml:6: kv_write.extra_rule = "
         "'e4m3_scale_floor': there is no second cache: leave it out"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_named(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(BASE + text + "\n", "f.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["{rows: bf16, rule: copy}", "{rule: copy}", "{rule: bad, foo: 1}", "{}"])
def test_rules_that_nothing_reads_are_an_error(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(BASE.replace("kv_cache", "topk") + f"kv_write: {text}\n", "f.yaml")
    assert str(caught.value) == "f.yaml:5: kv_write: nothing reads it: add kv_cache to ops, or leave it out"


def test_the_schema_lets_presets_fill_the_rules() -> None:
    part = json_schema()["$defs"]["KvWriteSpec"]
    assert "required" not in part and "pow2_scale_floor" in part["properties"]["rule"]["enum"]
