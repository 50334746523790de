"""The indexer's family: its spec, key format, plan, partition, and what explain tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dsagen.arch import ARCHS, arch
from dsagen.cli.app import cli
from dsagen.errors import GuardError, SpecError
from dsagen.families.indexer_logits.family import plan_main
from dsagen.families.indexer_logits.geometry import DIMS, preferred_geometry, smem_fields
from dsagen.families.indexer_logits.guards import PLAN_GUARDS
from dsagen.families.indexer_logits.op import (
    LogitsShape,
    Partition,
    RaggedShape,
    floor_seconds,
    partition_of,
    ragged_floor_seconds,
    ragged_partition,
)
from dsagen.families.indexer_logits.reference import limits_reference, logits_reference, read_keys
from dsagen.index_format import INDEX_FORMATS, index_format
from dsagen.matrix import expand
from dsagen.occupancy import resident_ctas
from dsagen.render import render
from dsagen.spec import IndexSpec, load_spec, parse_spec

VECTORS = Path(__file__).parents[1] / "vectors"
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["indexer_logits"]}
YAML = "model: v32\nheads: 16\narchs: [sm_90a]\nops: [indexer_logits]\n"


def plan_of(**changes: object) -> object:
    (plan,) = expand(load_spec({**SPEC, **changes})).plans()
    return plan


# ---- spec -----------------------------------------------------------------------------------------------------------


def test_the_model_fills_in_its_indexer() -> None:
    spec = load_spec(SPEC)
    assert (spec.index, spec.scores) == (IndexSpec(heads=64, dim=128, keys="fp8"), "fp32")
    assert load_spec({**SPEC, "model": "glm5"}).index == IndexSpec(heads=32, dim=128, keys="fp8")
    own = load_spec({**SPEC, "index": {"heads": 24, "dim": 64}, "scores": "bf16"})
    assert (own.index, own.scores) == (IndexSpec(heads=24, dim=64, keys="fp8"), "bf16")
    for text in (own.to_yaml(), own.to_json()):
        assert parse_spec(text) == own
    assert load_spec({**SPEC, "ops": ["topk"]}).index is None


def test_forms_and_accumulation_are_for_ops_that_score() -> None:
    text = YAML.replace("indexer_logits", "index_cache")
    for key, written, shown in (("forms", "[paged]", "['paged']"), ("accumulation", "fast", "'fast'")):
        with pytest.raises(SpecError) as caught:
            parse_spec(text + f"index: {{{key}: {written}}}\n", "f.yaml")
        assert str(caught.value) == (
            f"f.yaml:5: index.{key} = {shown}: nothing reads it: add indexer_logits to ops, or leave it out"
        )
    declared = {"forms": ["ragged"], "accumulation": "fast"}
    both = load_spec({**SPEC, "ops": ["indexer_logits", "index_cache"], "index": declared})
    caches = both.only("index_cache")
    assert load_spec(caches.to_mapping()) == caches
    assert caches.to_mapping()["index"] == {"heads": 64, "dim": 128, "keys": "fp8"}
    assert both.to_mapping()["index"] == {**caches.to_mapping()["index"], **declared}


def test_one_op_of_several_keeps_what_it_reads() -> None:
    spec = load_spec({**SPEC, "ops": ["topk", "indexer_logits"], "scores": "bf16"})
    assert (spec.only("topk").index, spec.only("topk").scores) == (None, "bf16")
    assert (spec.only("indexer_logits").index, spec.only("indexer_logits").scores) == (spec.index, "bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            YAML + "index: {heads: 12}\n",
            "f.yaml:5: index.heads = 12: is not allowed: must be an integer of 8 .. 128 (index heads, in steps of 8); "
            "the nearest is 16",
        ),
        (
            YAML + "index: {heads: 11}\n",
            "f.yaml:5: index.heads = 11: is not allowed: must be an integer of 8 .. 128 "
            "(index heads, in steps of 8); the nearest is 8",
        ),
        (
            YAML + "index: {heads: -10}\n",
            "f.yaml:5: index.heads = -10: is not allowed: must be an integer of 8 .. 128 "
            "(index heads, in steps of 8); the nearest is 8",
        ),
        (
            YAML + "index: {dim: 64.0}\n",
            "f.yaml:5: index.dim = 64.0: is not allowed: must be 32, 64 or 128",
        ),
        (
            YAML + "index: {heads: 136}\n",
            "f.yaml:5: index.heads = 136: is not allowed: must be an integer of 8 .. 128 (index heads, in steps of 8); "
            "the nearest is 128",
        ),
        (YAML + "index: {forms: ragged}\n", "f.yaml:5: index.forms = 'ragged': must be a list: write [ragged]"),
        (
            YAML + "index: {forms: [rows]}\n",
            "f.yaml:5: index.forms[0] = 'rows': is not allowed: must be 'paged', 'blocks', 'ragged' or",
        ),
        (YAML + "index: {forms: [ragged, paged, paged]}\n", "f.yaml:5: index.forms[2] = 'paged': is listed twice"),
        (YAML + "index: {forms: {paged: 1}}\n", "f.yaml:5: index.forms = {'paged': 1}: must be a list of names"),
        (YAML + "index: {forms:}\n", "f.yaml:5: index.forms = None: must be a list of names"),
        (YAML + "index: {forms: []}\n", "f.yaml:5: index.forms = []: must list at least one"),
        (
            YAML + "index: {accumulation: fp16}\n",
            "f.yaml:5: index.accumulation = 'fp16': is not allowed: must be 'fp32' or 'fast' (did you mean fp32?)",
        ),
        (YAML + "index: {accumulation:}\n", "f.yaml:5: index.accumulation = None: is not allowed: must be 'fp32' or"),
        (YAML + "index: {dim: 96}\n", "f.yaml:5: index.dim = 96: is not allowed: must be 32, 64 or 128"),
        (
            YAML + "index: {keys: fp9}\n",
            "f.yaml:5: index.keys = 'fp9': is no index-key format (did you mean fp8?): allowed are fp8, mxfp8, mxfp4",
        ),
        (
            YAML.replace("v32", "v41"),
            "f.yaml: index.keys: is missing: model v41 has none, for example fp8 or mxfp8 or mxfp4",
        ),
        (
            YAML.replace("indexer_logits", "topk") + "index: {heads: 64}\n",
            "f.yaml:5: index: nothing reads it: add indexer_logits or index_cache to ops, or leave it out",
        ),
    ],
)
def test_bad_indexers_are_named(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "f.yaml")
    # Nothing else is said of it.
    assert message in str(caught.value) and str(caught.value).count("f.yaml") == 1


# ---- format ---------------------------------------------------------------------------------------------------------


def test_bytes_of_the_fp8_format() -> None:
    record = index_format("fp8")
    assert [record.record_bytes(dim) for dim in DIMS] == [36, 68, 132]
    assert record.page_bytes(128, 64) == 8448
    assert (record.value_byte(128, 3, 5), record.scale_byte(128, 64, 3)) == (389, 8204)
    with pytest.raises(SpecError, match=r"^unknown index-key format 'fp' \(did you mean fp8\?\): known are fp8"):
        index_format("fp")


@pytest.mark.parametrize(("name", "record_bytes"), [("mxfp8", 132), ("mxfp4", 68)])
def test_bytes_of_the_block_scaled_formats(name: str, record_bytes: int) -> None:
    record = index_format(name)
    assert record.is_block_scaled and record.record_bytes(128) == record_bytes
    codes = record_bytes - 4
    assert (record.value_byte(128, 3, 5), record.value_shift(5)) == ((389, 0) if codes == 128 else (194, 4))
    assert [record.scale_byte(128, 64, 3, g) for g in range(4)] == [64 * codes + 12 + g for g in range(4)]
    assert [record.scale_count(dim) for dim in DIMS] == [1, 2, 4]
    # A word of scales is four bytes at any width.
    assert [record.record_bytes(dim) for dim in DIMS] == [codes * dim // 128 + 4 for dim in DIMS]


@pytest.mark.parametrize(("name", "vectors"), [("mxfp8", "index_fp8_mx"), ("mxfp4", "index_mxfp4_sept")])
def test_the_reference_reads_golden_block_scaled_keys(name: str, vectors: str) -> None:
    record = index_format(name)
    with np.load(VECTORS / f"{vectors}.npz") as data:
        pool, want, page_size = torch.from_numpy(data["pool"]), data["dequant_f32"], int(data["page_size"])
        stride = int(data["page_stride_bytes"])
    cache = pool.as_strided(
        (len(pool), page_size, 1, record.record_bytes(128)), (stride, record.record_bytes(128), 1, 1)
    )
    place = torch.arange(page_size)
    found, factors = read_keys(record, cache, 128, torch.zeros_like(place), place)
    assert torch.equal(found, torch.from_numpy(want[0]).double()) and bool((factors == 1).all())
    # The record's own arithmetic names the same bytes.
    for offset, dim in ((0, 0), (5, 77), (63, 127)):
        code = int(pool[0, record.value_byte(128, offset, dim)]) >> record.value_shift(dim)
        scale = int(pool[0, record.scale_byte(128, page_size, offset, dim // 32)])
        value = record.values.decode(code & (1 << record.values.bits) - 1) * record.scale.decode(scale)
        assert value == float(want[0, offset, dim])


def test_the_reference_reads_and_scores_golden_data() -> None:
    with np.load(VECTORS / "indexer_paged_fp8.npz") as data:
        pool, want = torch.from_numpy(data["pool"]), torch.from_numpy(data["logits_f64"])
        stride, page_size = int(data["page_stride_bytes"]), int(data["page_size"])
        cache = pool.as_strided((len(pool), page_size, 1, 132), (stride, 132, 132, 1))
        q = torch.from_numpy(data["q_e4m3"]).view(torch.float8_e4m3fn)
        rest = [torch.from_numpy(data[name]) for name in ("weights_f32", "context_lens", "block_table")]
    found, scored = logits_reference(q, cache, *rest, index_format("fp8"), want.shape[1])
    assert scored.equal(want != -torch.inf)
    assert float((found[scored] - want[scored]).abs().max()) < 1e-11
    last, offset = len(pool) - 1, page_size - 1
    values, scales = read_keys(index_format("fp8"), cache, 128, torch.tensor([last]), torch.tensor([offset]))
    byte = int(pool[last, 128 * offset + 77])
    scale = pool[last, 128 * page_size + 4 * offset :][:4].clone().view(torch.float32)
    code = INDEX_FORMATS["fp8"].values.decode(byte)
    assert (float(values[0, 77]), float(scales[0])) == pytest.approx((code, scale.item()), nan_ok=True)


def test_a_length_of_a_request_is_its_last_tokens() -> None:
    lens = torch.tensor([5, 0, -3, 1, 99])
    assert limits_reference(lens, 5, 3, 50).tolist() == [[3, 4, 5], [0, 0, 0], [0, 0, 0], [0, 0, 1], [50, 50, 50]]
    own = torch.tensor([[3, 9], [-1, 0]])
    assert limits_reference(own, 2, 2, 8).tolist() == [[3, 8], [0, 0]]


# ---- plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ARCHS)
def test_as_many_blocks_as_planned_fit_an_sm(name: str, dim: int) -> None:
    plan = plan_of(archs=[name], index={"dim": dim})
    assert resident_ctas(plan) == plan.min_blocks_per_sm
    assert plan.smem_bytes <= arch(name).smem_optin_bytes
    # One stage more would not leave room for as many blocks, or is more than helps.
    g = preferred_geometry(dim, arch(name))
    more = smem_fields(replace(g, stages=g.stages + 1))[1]
    assert (
        g.stages == 4 or (more + 1024) * g.per_sm > arch(name).smem_per_sm_bytes or more > arch(name).smem_optin_bytes
    )


def test_heads_and_tokens_are_no_axis() -> None:
    assert {plan_of(index={"heads": heads}).slug for heads in (8, 64, 128)} == {
        "indexer_logits-main-mma_sync-sm_90a-keys.fp8-dim.128-score.fp32-smem.227"
    }


def test_a_spec_has_a_kernel_for_each_form_of_keys() -> None:
    def kernels(**index: object) -> list[str]:
        return [plan.variant.kernel for plan in expand(load_spec({**SPEC, "index": index})).plans()]

    assert kernels() == kernels(forms=["paged"]) == ["main"]
    assert kernels(forms=["ragged", "paged"]) == ["ragged", "main"]
    assert kernels(forms=["candidates"]) == ["candidates"]
    assert kernels(forms=["paged", "blocks"]) == ["main", "blocks"]
    spec = load_spec({**SPEC, "index": {"forms": ["ragged"], "keys": "mxfp4"}})
    assert parse_spec(spec.to_yaml()) == spec


def test_tokens_with_lists_of_their_own_share_no_pass() -> None:
    plan, shape = plan_of(index={"forms": ["candidates"], "heads": 32}), LogitsShape(16, 2, 16384, 32)
    assert partition_of(plan, shape, 132) == Partition(1, 2, 8192, 264)
    moved = 32 * 16384 * (132 + 4)
    assert floor_seconds(plan, shape, arch("sm_90a")) == pytest.approx(moved / 4.53e12)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (RaggedShape(4096, 32768, 64), (2, 2048, 1048576, 264)),
        (RaggedShape(1, 63, 64), (1, 1, 1, 1)),
        (RaggedShape(5, 130, 24), (5, 1, 3, 3)),
        (RaggedShape(3, 0, 128), (1, 3, 0, 1)),
    ],
)
def test_partitions_of_calls_over_keys_in_one_piece(shape: RaggedShape, expected: tuple[int, ...]) -> None:
    part = ragged_partition(plan_of(index={"forms": ["ragged"]}), shape, 132)
    assert (part.unit_tokens, part.unit_count, part.tiles, part.blocks) == expected


def test_a_unit_that_is_refused_says_so() -> None:
    variant = plan_of().variant
    wide = replace(preferred_geometry(128, arch("sm_90a")), stages=9)
    with pytest.raises(GuardError, match=r"^\[K-01\] shared memory: the plan needs \d+ B .* \(indexer_logits-main-"):
        plan_main(variant, wide)
    for field, value, guard_id in (("blocks", 3, "IL-01"), ("query_rows", 64, "IL-03"), ("stages", 0, "IL-04")):
        with pytest.raises(GuardError, match=rf"^\[{guard_id}\]"):
            plan_main(variant, replace(preferred_geometry(128, arch("sm_90a")), **{field: value}))
    assert all(f"[{guard.guard_id}]" in render(plan_of()).text for guard in PLAN_GUARDS)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (LogitsShape(1, 1, 4096, 64), (1, 1, 64, 64)),
        (LogitsShape(128, 1, 32768, 64), (1, 1, 65536, 264)),
        (LogitsShape(2, 8, 100, 64), (2, 4, 16, 16)),
        (LogitsShape(2, 3, 100, 64), (2, 2, 8, 8)),
        (LogitsShape(2, 8, 64, 8), (8, 1, 2, 2)),
        (LogitsShape(2, 5, 64, 128), (1, 5, 10, 10)),
        (LogitsShape(2, 3, 0, 40), (3, 1, 0, 1)),
    ],
)
def test_partitions(shape: LogitsShape, expected: tuple[int, ...]) -> None:
    part = partition_of(plan_of(), shape, 132)
    assert (part.unit_tokens, part.unit_count, part.tiles, part.blocks) == expected


def test_the_floor_counts_keys_once_a_request_and_scores_once_a_token() -> None:
    plan, h200 = plan_of(), arch("sm_90a")
    assert floor_seconds(plan, LogitsShape(128, 1, 32768, 64), h200) == pytest.approx(128 * 32768 * 136 / 4.53e12)
    flops = 2 * 128 * 8 * 32768 * 64 * 128
    assert floor_seconds(plan, LogitsShape(128, 8, 32768, 64), h200) == pytest.approx(flops / 797e12)
    assert floor_seconds(plan, LogitsShape(1, 1, 64, 8), arch("sm_80")) is None


def test_the_ragged_floor_counts_products_of_every_pair() -> None:
    plan = plan_of(index={"forms": ["ragged"]})
    flops = 2 * 4096 * 32768 * 64 * 128
    assert ragged_floor_seconds(plan, RaggedShape(4096, 32768, 64), arch("sm_90a")) == pytest.approx(flops / 797e12)
    moved = 1_000_000 * (132 + 4)
    assert ragged_floor_seconds(plan, RaggedShape(1, 1_000_000, 8), arch("sm_90a")) == pytest.approx(moved / 4.53e12)
    assert ragged_floor_seconds(plan, RaggedShape(1, 64, 8), arch("sm_80")) is None


def test_explain_tells_kernels_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSAGEN_INDEXER_LOGITS_BODY", "mma_sync")
    kernels = CliRunner().invoke(cli, ["explain", "v32_indexer_h128"]).output
    assert kernels.startswith(
        "v32_indexer_h128: v32, 128 heads, KV v32 (topk 2048), index of 64 heads x 128, fp8 keys, fast accumulation, "
        "fp32 scores\n"
    )
    for text in ("132 B of memory traffic a key", "[IL-10]  row_stride_bytes ==", "grid of min(2 x SMs, tiles) blocks"):
        assert text in kernels
    call = CliRunner().invoke(cli, ["explain", "v32_indexer_h128", "--batch", "2", "--s-q", "3", "--width", "100"])
    assert "shape: 2 requests of 3 tokens, 64 heads, up to 100 keys\n" in call.output
    assert "units: 2 a request, 2 tokens share a pass over its keys\n" in call.output
    assert "grid: 8 CTAs share up to 8 tiles of 64 keys\n" in call.output
    missing = CliRunner().invoke(cli, ["explain", "v32_indexer_h128", "--batch", "2"])
    assert "what a call of indexer_logits takes depends on its keys: give --width" in str(missing.exception)
    refused = CliRunner().invoke(cli, ["explain", "v32_indexer_h128", "--batch", "2", "--s-q", "9", "--width", "1"])
    assert "refuses: q: 2 requests of 9 tokens" in refused.output
