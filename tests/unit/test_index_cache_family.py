"""The index cache's family: its spec, rules against golden data and plain arithmetic, plans, and what explain tells."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dsagen.arch import ARCHS, arch
from dsagen.check.scalar_rule import scalar_group, scalar_scale
from dsagen.cli.app import cli
from dsagen.dtype import E2M1, E4M3
from dsagen.errors import GuardError, SpecError
from dsagen.families import index_cache
from dsagen.families.index_cache.family import FAMILY
from dsagen.families.index_cache.op import blocks_for, key_traffic_bytes
from dsagen.families.index_cache.reference import gather_reference, quantise_keys, write_reference
from dsagen.families.indexer_logits.reference import read_keys
from dsagen.index_format import INDEX_FORMATS, IndexFormat, index_format
from dsagen.index_rule import INDEX_RULES, default_index_rule, index_rule, index_rules_of
from dsagen.kv_rule import WRITE_RULES
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import IndexWriteSpec, json_schema, load_spec, parse_spec

VECTORS = Path(__file__).parents[1] / "vectors"
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["index_cache"]}
YAML = "model: v32\nheads: 16\narchs: [sm_90a]\nops: [index_cache]\n"
# Golden file: format, and the rules of the writer that made it.
GOLDEN = {
    "fp8_raw": ("fp8", ("amax_floor", "amax_floor_reciprocal")),
    "fp8_pow2": ("fp8", ("pow2_amax_floor",)),
    "fp8_mx": ("mxfp8", ("pow2_amax_floor",)),
    "mxfp4_june": ("mxfp4", ("pow2_amax_floor_ties_down",)),
    "mxfp4_sept": ("mxfp4", ("pow2_amax_floor",)),
}
EVERY_RULE = [(name, rule) for name, record in INDEX_FORMATS.items() for rule in index_rules_of(record)]


def plans_of(**changes: object) -> dict[str, KernelPlan]:
    return {plan.variant.kernel: plan for plan in expand(load_spec({**SPEC, **changes})).plans()}


# ---- spec -----------------------------------------------------------------------------------------------------------


def test_the_rule_is_the_formats_default_unless_given() -> None:
    spec = load_spec(SPEC)
    assert spec.index_write == IndexWriteSpec(rows="bf16", rule="pow2_amax_floor")
    assert parse_spec(spec.to_yaml()) == spec == load_spec(spec.to_mapping())
    own = load_spec({**SPEC, "index": {"keys": "mxfp4"}, "index_write": {"rule": "pow2_scale_floor", "rows": "fp32"}})
    assert own.index_write == IndexWriteSpec(rows="fp32", rule="pow2_scale_floor")
    assert [default_index_rule(record) for record in INDEX_FORMATS.values()] == ["pow2_amax_floor"] * 3
    other = load_spec({**SPEC, "ops": ["topk"]})
    assert other.index_write is None and "index_write" not in other.to_mapping()
    both = load_spec({**SPEC, "ops": ["indexer_logits", "index_cache"]})
    assert both.only("index_cache").index_write == both.index_write and both.only("index_cache").scores is None
    assert both.only("indexer_logits").index_write is None and both.only("indexer_logits").index == both.index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index_write: {rule: amax_flor}", "f.yaml:5: index_write.rule = 'amax_flor': fp8 index keys are not written "
         "by it (did you mean amax_floor?): allowed are pow2_amax_floor, amax_floor, amax_floor_reciprocal, "
         "amax_floor_multiply"),
        ("index: {keys: mxfp8}\nindex_write: {rule: amax_floor}", "f.yaml:6: index_write.rule = 'amax_floor': mxfp8 "
         "index keys are not written by it: allowed are pow2_amax_floor"),
        ("index_write: {rows: fp8}", "f.yaml:5: index_write.rows = 'fp8': is not allowed: must be 'bf16', 'fp16' or "
         "'fp32' (did you mean fp32?)"),
        ("index_write: {keys: fp8}", "f.yaml:5: index_write.keys: unknown key: allowed are rows, rule"),
        ("index_write: bf16", "f.yaml:5: index_write = 'bf16': must be a mapping with the keys rows, rule"),
        ("index_write:", "f.yaml:5: index_write: is empty: leave it out"),
        ("index: {keys: fp9}", "f.yaml:5: index.keys = 'fp9': is no index-key format (did you mean fp8?): allowed are "
         "fp8, mxfp8, mxfp4"),
        ("index: {keys: [fp8]}", "f.yaml:5: index.keys = ['fp8']: is not allowed: input should be a valid string "
         "(did you mean fp8?): allowed are fp8, mxfp8, mxfp4"),
        ("index:", "f.yaml:5: index: is empty: leave it out"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_named(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(YAML + text + "\n", "f.yaml")
    assert str(caught.value) == message


def test_a_rule_that_nothing_reads_is_an_error() -> None:
    text = YAML.replace("index_cache", "indexer_logits") + "index_write: {rule: amax_floor}\n"
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "f.yaml")
    assert str(caught.value) == "f.yaml:5: index_write: nothing reads it: add index_cache to ops, or leave it out"
    part = json_schema()["$defs"]["IndexWriteSpec"]
    assert "required" not in part and part["properties"]["rule"]["enum"] == list(INDEX_RULES)


# ---- rules ----------------------------------------------------------------------------------------------------------


def golden(name: str) -> tuple[IndexFormat, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Format, cache over its storage, keys, and the values that its library reads back."""
    record = index_format(GOLDEN[name][0])
    with np.load(VECTORS / f"index_{name}.npz") as data:
        pool, page_size = torch.from_numpy(data["pool"]), int(data["page_size"])
        x = torch.from_numpy(data["x_bf16"].view(np.int16)).view(torch.bfloat16).flatten(0, 1)
        values = torch.from_numpy(data["dequant_f32"]).flatten(0, 1)
    size = record.record_bytes(128)
    return record, pool.as_strided((len(pool), page_size, 1, size), (pool.stride(0), size, size, 1)), x, values


@pytest.mark.parametrize("name", GOLDEN)
def test_the_reference_writes_golden_caches_by_their_rules_alone(name: str) -> None:
    record, cache, x, values = golden(name)
    storage = cache.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    for rule in index_rules_of(record):
        ours = torch.full_like(whole, 0xFF)
        write_reference(record, ours.as_strided(cache.shape, cache.stride()), x, torch.arange(len(x)), rule)
        assert ours.equal(whole) == (rule in GOLDEN[name][1]), rule
    page = torch.zeros(len(x), dtype=torch.int64)
    operands, factors = read_keys(record, cache, 128, page, torch.arange(len(x)))
    assert (operands * factors[:, None]).float().equal(values)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(("name", "rule_id"), EVERY_RULE)
def test_rules_in_torch_are_those_in_python(name: str, rule_id: str, dim: int) -> None:
    record, rule = index_format(name), index_rule(index_format(name), rule_id)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(12, dim, generator=generator)
    x *= torch.randint(-140, 100, (12, dim // 16), generator=generator).float().exp2().repeat_interleave(16, 1)
    x[0], x[1, ::2], x[2] = 0.0, -0.0, 448.0
    x[3] = torch.randint(-26, 27, (dim,), generator=generator) / 4.0
    x[4] = x[3].abs().clamp(max=6.0)
    x[4, ::16] = 6.0
    codes, words = quantise_keys(record, x, rule_id)
    count, size = record.scale_count(dim), record.scale.bytes_per_element
    for row in range(12):
        data = codes[row].tolist()
        found = data if rule.values is E4M3 else [code for byte in data for code in (byte & 15, byte >> 4)]
        for g in range(count):
            dims = slice(g * dim // count, (g + 1) * dim // count)
            stored = bytes(words[row, g * size : (g + 1) * size].tolist())
            want = scalar_group(rule, x[row, dims].tolist())
            assert (record.scale.decode(int.from_bytes(stored, "little")), found[dims]) == want
    assert (words[:, count * size :] == 127).all()


def test_anchors() -> None:
    fp8, fp4 = index_rule(index_format("fp8"), "pow2_amax_floor"), index_rule(index_format("mxfp4"), "pow2_amax_floor")
    assert [scalar_scale(fp8, amax) for amax in (448.0, 448.5, 0.0)] == [1.0, 2.0, 2.0**-22]
    assert [scalar_scale(fp4, amax) for amax in (6.0, 6.5, 0.0)] == [1.0, 2.0, 2.0**-15]
    assert scalar_scale(index_rule(index_format("mxfp4"), "pow2_scale_floor"), 0.0) == 2.0**-13
    zeros = torch.zeros(1, 128)
    assert quantise_keys(index_format("mxfp8"), zeros, "pow2_amax_floor")[1].tolist() == [[105] * 4]
    assert quantise_keys(index_format("mxfp4"), zeros, "pow2_amax_floor")[1].tolist() == [[112] * 4]
    assert quantise_keys(index_format("mxfp4"), zeros, "pow2_scale_floor_ties_down")[1].tolist() == [[114] * 4]


def test_codes_of_the_codec_file() -> None:
    """Both rules of ties, through keys whose scale is 1."""
    with np.load(VECTORS / "codec.npz") as data:
        given = {name: data[name] for name in ("e2m1_in_f32", "e2m1_even_drop", "e2m1_down_drop")}
    finite = np.isfinite(given["e2m1_in_f32"]) & (np.abs(given["e2m1_in_f32"]) <= 6)
    values = torch.from_numpy(given["e2m1_in_f32"][finite])
    assert len(values) > 40
    x = torch.zeros(len(values), 32)
    x[:, 0], x[:, 1] = 6.0, values
    for rule, name in (("pow2_amax_floor", "e2m1_even_drop"), ("pow2_amax_floor_ties_down", "e2m1_down_drop")):
        codes, words = quantise_keys(index_format("mxfp4"), x, rule)
        assert (words[:, 0] == 127).all() and (codes[:, 0] & 15 == 7).all()
        assert (codes[:, 0] >> 4).numpy().tolist() == given[name][finite].tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scales_that_are_no_numbers(value: float) -> None:
    x = torch.ones(2, 128)
    x[0, 40] = value
    for name in INDEX_FORMATS:
        codes, words = quantise_keys(index_format(name), x, "pow2_amax_floor")
        if name == "fp8":
            assert words[0].view(torch.float32).isnan().all() and (codes[0] == 0x7F).all()
            continue
        size = 32 if name == "mxfp8" else 16
        assert words[0].tolist() == [words[1, 0], 255, words[1, 0], words[1, 0]]
        assert (codes[0, size : 2 * size] == (0x7F if name == "mxfp8" else 0)).all()
        assert codes[0, :size].equal(codes[1, :size]) and codes[0, 2 * size :].equal(codes[1, 2 * size :])


def test_a_gather_gives_zeros_without_a_key() -> None:
    record, cache, x, _ = golden("fp8_raw")
    codes, words = gather_reference(record, cache, 128, torch.tensor([-1, 5, len(x)]))
    want, scale = quantise_keys(record, x[5:6], "amax_floor")
    assert codes[1:2].equal(want) and words[1:2].equal(scale)
    assert not codes[[0, 2]].any() and not words[[0, 2]].any()


def test_names_mean_what_they_mean_for_kv_caches() -> None:
    for name, rule_id in EVERY_RULE:
        rule = index_rule(index_format(name), rule_id)
        if rule.values is E4M3 and rule_id in WRITE_RULES:
            assert rule == WRITE_RULES[rule_id]
    assert {index_rule(index_format("mxfp4"), r).values for r in index_rules_of(index_format("mxfp4"))} == {E2M1}
    with pytest.raises(SpecError, match="mxfp8 index keys are not written by it: allowed are pow2_amax_floor"):
        index_rule(index_format("mxfp8"), "amax_floor")


def test_the_readme_tells_every_rule_and_the_defaults() -> None:
    text = (Path(index_cache.__file__).parent / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|.*\|(.*)\|$", text, re.MULTILINE)
    told = [(name, rule) for rule, formats, _ in rows for name in formats.split(", ")]
    assert sorted(told) == sorted(EVERY_RULE)
    defaults = {(name, rule) for rule, formats, engines in rows for name in formats.split(", ") if "default" in engines}
    assert defaults == {(name, default_index_rule(record)) for name, record in INDEX_FORMATS.items()}


# ---- plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize(("keys", "rule"), EVERY_RULE)
def test_every_kernel_is_planned_and_rendered(keys: str, rule: str, name: str) -> None:
    for dim in (32, 64, 128):
        plans = plans_of(archs=[name], index={"heads": 8, "dim": dim, "keys": keys}, index_write={"rule": rule})
        assert set(plans) == {"write", "gather"}
        for role, plan in plans.items():
            text = render(plan).text
            assert plan.symbol in text
            assert [g.guard_id for g in plan.guards] == ["K-02", "IC-01", "IC-02"][: 1 if role == "gather" else None]
            for guard in plan.guards:
                assert f'static_assert({guard.c_expression}, "[{guard.guard_id}] {guard.expression}");' in text
            assert plan.threads * plan.registers_cap * plan.min_blocks_per_sm <= arch(name).registers_per_sm


def test_a_width_that_is_not_built_is_refused_with_the_slug() -> None:
    variant = plans_of()["write"].variant
    axes = tuple((name, 96 if name == "dim" else value) for name, value in variant.axes)
    with pytest.raises(GuardError, match=r"^\[IC-01\] index keys of 96 dims: .* \(index_cache-write-.*\)$"):
        FAMILY.plan(replace(variant, axes=axes))


@pytest.mark.parametrize(("keys", "dim", "write", "gather"), [("fp8", 128, 16, 16), ("mxfp4", 128, 16, 32),
                                                             ("fp8", 32, 64, 64), ("mxfp4", 32, 64, 128)])  # fmt: skip
def test_grids_and_traffic(keys: str, dim: int, write: int, gather: int) -> None:
    plans, record = plans_of(index={"heads": 8, "dim": dim, "keys": keys}), index_format(keys)
    for role, per_block in (("write", write), ("gather", gather)):
        counts = (0, 1, per_block, per_block + 1)
        assert [blocks_for(plans[role], rows) for rows in counts] == [0, 1, 1, 2]
        assert plans[role].grid == f"ceil(rows / {per_block})"
    size = record.record_bytes(dim)
    traffic = {role: key_traffic_bytes(plan) for role, plan in plans.items()}
    assert traffic == {"write": size + 2 * dim, "gather": 2 * size}
    assert dict(plans["write"].budget)["floor"] == f"{size + 2 * dim} B of memory traffic a key"


def test_explain_tells_kernels_and_calls() -> None:
    kernels = CliRunner().invoke(cli, ["explain", "v4_index_cache_h64"]).output
    assert "index of 64 heads x 128, mxfp4 keys, bf16 index keys by pow2_amax_floor\n" in kernels
    assert kernels.count("[IC-03]  slots <= keys") == 2 and kernels.count("0 B of dynamic") == 2
    calls = CliRunner().invoke(cli, ["explain", "v32_index_cache_h128", "--batch", "100", "--s-q", "2"]).output
    assert calls.startswith("v32_index_cache_h128 on sm_90a\nshape: 200 keys\n")
    assert "  grid: 13 CTAs; 77600 B of traffic, 0.02 us at the least; workspace: 0 B\n" in calls


def test_shipped_specs_are_complete_on_every_arch() -> None:
    for name in ("v32_index_cache_h128", "v4_index_cache_h64"):
        expand(load_spec(name).replace(archs=list(ARCHS))).require_complete()
