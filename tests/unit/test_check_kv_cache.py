"""The check of the cache ops: its cases, that right kernels pass and wrong ones do not, and its scalar rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsagen.check.kv_cases import FAR_PAD_BYTES, FAR_PAGES, PAGE_SIZES, Action, Contents, KvCase, Probe, kv_cases
from dsagen.check.kv_run import KvRun
from dsagen.check.probes import WrongResultError
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.check.scalar_rule import fp32, scalar_group, scalar_scale
from dsagen.dtype import E2M1, E4M3
from dsagen.families.kv_cache.geometry import other_layout
from dsagen.families.kv_cache.reference import (
    convert_reference,
    quantise_rows,
    read_reference,
    table_slots,
    write_reference,
)
from dsagen.kv_format import KV_FORMATS, kv_format
from dsagen.kv_rule import WRITE_RULES, rules_of, write_rule
from dsagen.spec import load_spec

CPU = torch.device("cpu")
VECTORS = Path(__file__).parents[1] / "vectors"
SPEC = {"model": "v41", "heads": 16, "archs": ["sm_90a"], "ops": ["kv_cache"]}
SPLIT = {"model": "custom", "kv": "bf16_split", "topk": 64, "heads": 16, "archs": ["sm_90a"], "ops": ["kv_cache"]}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are small: threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ModelCache:
    """The ops in torch on a CPU; `defect` makes them wrong in one way."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def _record(self, extra):
        return self.spec.extra_kv_format if extra else self.spec.kv_format

    def _caches(self, record, k_cache, kpe_cache):
        pools = [k_cache] if kpe_cache is None else [k_cache, kpe_cache]
        return dict(zip((tensor.name for tensor in record.tensors), pools, strict=True))

    def kv_write(self, rows, k_cache, slots, *, k_pe=None, kpe_cache=None, extra=False):
        self.calls += 1
        record, write = self._record(extra), self.spec.kv_write
        rule = write.extra_rule if extra else write.rule
        if self.defect == "another rule":
            rule = {"pow2_scale_floor": "pow2_amax_floor", "normal_floor": "amax_floor_multiply"}[rule]
        if k_pe is not None:
            rows = torch.cat((rows, rows[:, :64] if self.defect == "ignores k_pe" else k_pe), 1)
        if self.defect == "takes low bits of slots":
            slots = slots.to(torch.int32).long() if slots.dtype is torch.int64 else slots
        if self.defect == "wraps slots":
            slots = torch.where(slots < 0, slots, slots % (k_cache.shape[0] * k_cache.shape[1]))
        if self.defect == "flushes":
            rows = torch.where(rows.abs() < 2.0**-126, 0.0, rows)
        write_reference(record, self._caches(record, k_cache, kpe_cache), rows, slots, rule)
        if self.defect == "writes the padding":
            flat = torch.empty(0, dtype=torch.uint8).set_(k_cache.untyped_storage())
            flat[-1] = 0
        if self.defect == "is not the same each time" and self.calls % 7 == 0:
            k_cache.view(torch.uint8)[0, 0, 0, 0] ^= 1

    def kv_read(self, k_cache, *, slots=None, block_table=None, row_starts=None, token_starts=None, rows=None,
                kpe_cache=None, extra=False, out=None):  # fmt: skip
        record = self._record(extra)
        if slots is None:
            first = None if self.defect == "ignores token_starts" else token_starts
            slots = table_slots(block_table, row_starts, first, k_cache.shape[1], rows)
        found = read_reference(record, self._caches(record, k_cache, kpe_cache), slots)
        if self.defect == "truncates":
            exact = read_reference(record, self._caches(record, k_cache, kpe_cache), slots).float()
            found = (exact * 0.995).bfloat16()
        kept = (slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1])
        if self.defect == "leaves rows without a slot":
            out[kept] = found[kept]
            return out
        out.copy_(found)
        if self.defect == "writes past the row":
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).fill_(0)
        return out.clone() if self.defect == "returns another tensor" else out

    def kv_convert(self, source, target, *, source_slots, target_slots, extra=False):
        record = self._record(extra)
        other = record if self.defect == "does not change the layout" else other_layout(record)
        convert_reference(other, {"k_cache": source}, record, {"k_cache": target}, source_slots, target_slots)


def results_of(cases, defect="", **changes):
    spec = load_spec({**SPEC, **changes})
    kernels = KernelCache(spec, CPU, lambda s, device: ModelCache(s, defect))
    return run_cases(cases, kernels, CPU, seed=3)


def cpu_cases(spec):
    return [case for case in kv_cases(spec, "quick") if case.probe is not Probe.GRAPH]


CONFIGURATIONS = [
    {},
    {"kv": {"format": "v41", "layout": "page_split"}, "extra_kv": "none", "kv_write": {"rows": "fp32"}},
    {"model": "v32"},
    {"model": "v4", "extra_kv": "none"},
    {"model": "glm5_nope", "kv_write": {"rows": "fp16"}},
    SPLIT,
    {"model": "v32", "kv": "fp16"},
]


@pytest.mark.parametrize("changes", CONFIGURATIONS, ids=str)
def test_a_right_implementation_passes(changes):
    cases = cpu_cases(load_spec({**SPEC, **changes}))
    results = results_of(cases, **changes)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) >= 50 and {r.op for r in results} == {"kv_cache"}


def test_the_lists_are_complete():
    spec = load_spec(SPEC)
    quick, full = kv_cases(spec, "quick"), kv_cases(spec, "full")
    assert set(quick) < set(full)
    for extra in (False, True):
        mine = [case for case in quick if case.extra == extra]
        assert {c.action for c in mine} == set(Action) and {c.contents for c in mine} == set(Contents)
        assert {c.probe for c in mine} == set(Probe) and {c.apart for c in mine} == {False, True}
        for action in Action:
            assert {c.page_size for c in mine if c.action is action} >= set(PAGE_SIZES)
            assert {c.wide_slots for c in mine if c.action is action} == {False, True}
    assert FAR_PAGES * FAR_PAD_BYTES > 2**32 and any(case.pad_bytes == FAR_PAD_BYTES for case in full)
    assert len({case.name for case in full}) == len(full) and all(case.name.startswith("kv.") for case in full)
    one = kv_cases(load_spec({**SPEC, "model": "v32"}), "full")
    assert not any(case.extra or case.action is Action.CONVERT for case in one)
    assert not any(case.apart for case in kv_cases(load_spec({**SPEC, "model": "glm5_nope"}), "full"))


PLACED = KvCase("kv.x", Action.WRITE, rows=60, pages=30, pad_bytes=32)
NARROW = KvCase("kv.x", Action.WRITE, rows=60, pages=30, wide_slots=False)
READ = KvCase("kv.x", Action.READ, rows=60)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("another rule", KvCase("kv.x", Action.WRITE, contents=Contents.ZEROS), "k_cache: byte "),
        ("takes low bits of slots", PLACED, "k_cache: byte "),
        ("wraps slots", NARROW, "k_cache: byte "),
        ("ignores k_pe", KvCase("kv.x", Action.WRITE, apart=True), "k_cache: byte "),
        ("writes the padding", PLACED, "k_cache: byte 2671 of page 29 is 0x00, expected 0x7f; 1 bytes differ"),
        ("is not the same each time", KvCase("kv.x", Action.WRITE, probe=Probe.REPEATED), "k_cache: byte 0 of page 0"),
        ("leaves rows without a slot", READ, "out[0, 0] = -7.0, expected 0.0; "),
        ("truncates", READ, "out["),
        ("writes past the row", READ, "out[0, 512] = 0.0, expected -7.0; 1 elements"),
        ("returns another tensor", READ, "the op did not return the output that it was given"),
        ("ignores token_starts", KvCase("kv.x", Action.TABLE, rows=60), "out["),
        ("does not change the layout", KvCase("kv.x", Action.CONVERT, rows=60), "k_cache: byte "),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


def test_flushed_subnormals_are_noticed_where_a_format_keeps_them():
    case = KvCase("kv.x", Action.WRITE, contents=Contents.MAGNITUDES)
    (right,), (wrong,) = (
        results_of([case], model="v32", kv="bf16"),
        results_of([case], "flushes", model="v32", kv="bf16"),
    )
    assert (right.status, wrong.status) == ("passed", "failed")


def test_graphs_do_not_run_without_a_device():
    cases = [case for case in kv_cases(load_spec(SPEC), "quick") if case.probe is Probe.GRAPH]
    results = results_of(cases)
    assert len(cases) == 8 and {(r.status, r.problem) for r in results} == {("not_run", "needs a CUDA device")}


@pytest.mark.parametrize("defect", ["", "writes the padding"])
def test_replayed_contents_are_others_of_the_same_shapes(defect):
    spec = load_spec(SPEC)
    for case in kv_cases(spec, "quick"):
        if case.probe is not Probe.GRAPH or (defect and (case.extra or case.action is not Action.WRITE)):
            continue
        kernels = ModelCache(spec, defect)
        run = KvRun(case, lambda _, own=kernels: own, CPU, seed=3)
        call, other = run.make_call(spec), run.make_call(spec, variation=1)
        assert any(not torch.equal(call.inputs[name], other.inputs[name]) for name in call.inputs)
        out = run.call(kernels, call)
        call.copy_from(other)
        before = {name: storage_copy(pool) for name, pool in call.caches.items()}
        if out is not None:
            out.fill_(-7.0)
        run.call(kernels, call, out)
        if defect:
            with pytest.raises(WrongResultError, match="k_cache: byte "):
                run.compare(spec, call, before, out)
        else:
            run.compare(spec, call, before, out)


def storage_copy(pool):
    data = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage()).clone()
    return data.view(pool.dtype).as_strided(pool.shape, pool.stride())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_spec_is_checked_op_by_op():
    report = run_check(load_spec({**SPEC, "ops": ["topk", "kv_cache"], "scores": "bf16"}), seed=1)
    assert [(r.name, r.status) for r in report.host_results] == [
        ("host.every cell renders", "passed"),
        ("host.bytes follow the format record", "passed"),
        ("host.rules are their arithmetic", "passed"),
        ("host.selections are those of sorted lists", "passed"),
    ]
    assert report.of_op("kv_cache").count("not_run") == len(kv_cases(load_spec(SPEC), "quick"))
    assert len(cases_of(load_spec(SPEC), "sm_90a", "quick", "kv.extra.convert.page*")) == 2 * len(PAGE_SIZES)


def test_kernels_for_an_ops_cases_are_of_that_op_alone():
    loaded = []
    spec = load_spec({**SPEC, "model": "v32", "ops": ["sparse_decode", "topk", "kv_cache"]})
    kernels = KernelCache(spec, CPU, lambda s, device: loaded.append(s) or ModelCache(s))
    from dsagen.check.topk_cases import TopkCase

    kernels(READ), kernels(TopkCase("", 1, 1, 1)), kernels(READ)
    assert [(s.ops, s.scores, s.kv_write is None) for s in loaded] == [
        (("kv_cache",), None, False),
        (("topk",), "fp32", True),
    ]


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", WRITE_RULES.values(), ids=WRITE_RULES)
def test_rules_in_torch_are_those_in_python(rule):
    record = next(r for r in KV_FORMATS.values() if rule.serves(r))
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, record.d_qk, generator=generator)
    x *= torch.randint(-140, 100, (40, record.d_qk // 16), generator=generator).float().exp2().repeat_interleave(16, 1)
    x[0], x[1, ::2], x[2] = 0.0, -0.0, 448.0
    written = quantise_rows(record, x, rule.rule_id)
    scales, group_dims = record.segment("scales").element, record.scale_group_dims
    size = scales.bits // 8
    for row in range(40):
        for group in range(0, record.scale_groups, 3):
            scale, codes = scalar_group(rule, x[row, group * group_dims : (group + 1) * group_dims].tolist())
            stored = bytes(written["scales"][row, group * size : (group + 1) * size].tolist())
            assert scales.decode(int.from_bytes(stored, "little")) == scale
            data = written["values"][row].tolist()
            found = data if rule.values is E4M3 else [code for byte in data for code in (byte & 15, byte >> 4)]
            assert found[group * group_dims : (group + 1) * group_dims] == codes


@pytest.mark.parametrize("record", [r for r in KV_FORMATS.values() if r.scale_groups], ids=lambda r: r.format_id)
def test_groups_that_are_no_numbers(record):
    x = torch.ones(3, record.d_qk)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    for rule_id in rules_of(record):
        written = quantise_rows(record, x, rule_id)
        fp4 = write_rule(record, rule_id).values is E2M1
        size = record.segment("scales").size_bytes // record.scale_groups
        values = record.scale_group_dims * record.segment("values").element.bits // 8
        scale = written["scales"][:, :size].tolist()
        codes = written["values"][:, :values]
        if fp4:
            assert [s[0] for s in scale] == [0x7F, 0x7E, 0x7E]
            assert (codes[0] == 0).all() and codes[1, 0] == 0x70 and codes[2, 1] == 0x0F
        else:
            assert (codes == 0x7F).all()
            element = record.segment("scales").element
            assert all(np.isnan(element.decode(int.from_bytes(bytes(s), "little"))) for s in scale)


def test_anchors():
    pow2, amax, fp4 = (WRITE_RULES[name] for name in ("pow2_scale_floor", "pow2_amax_floor", "e4m3_scale_floor"))
    assert [scalar_scale(pow2, a) for a in (448.0, 448.5, 0.0)] == [1.0, 2.0, 2.0**-13]
    assert scalar_scale(amax, 0.0) == 2.0**-22
    assert [scalar_scale(fp4, a) for a in (6.0, 0.0, 1e30)] == [1.0, 2.0**-9, 448.0]
    assert [E4M3.encode(v) for v in (1.0, 448.0, 1e9, 2.0**-9, 2.0**-10, -(2.0**-11))] == [
        0x38, 0x7E, 0x7E, 0x01, 0x00, 0x80]  # fmt: skip
    assert [E2M1.encode(v) for v in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.1)] == [0, 2, 2, 4, 4, 6, 6, 8]
    assert fp32(1 / 448) != 1 / 448 and scalar_scale(WRITE_RULES["normal_floor"], 0.0) == 2.0**-126
    # amax / 448 and amax x (1 / 448) differ, and so do the rules.
    divides, multiplies = WRITE_RULES["amax_floor"], WRITE_RULES["amax_floor_multiply"]
    assert sum(scalar_scale(divides, a) != scalar_scale(multiplies, a) for a in map(float, range(1, 449))) > 200


GOLDEN_RULES = {
    "V32_fm": ("v32", "pow2_scale_floor"), "V32_fi_glm": ("v32", "amax_floor"),
    "V32_sgl": ("v32", "normal_floor_reciprocal"), "V32_NO_ROPE_fm": ("v32_nope", "pow2_scale_floor"),
    "V4_fm": ("v4", "pow2_scale_floor"), "V4_vllm": ("v4", "pow2_amax_floor"), "V4_fi": ("v4", "pow2_scale_floor"),
    "V41_fm": ("v41_page_split", "pow2_scale_floor"), "V41_interleaved_fm": ("v41_interleaved", "pow2_scale_floor"),
    "V41_FP4_fm": ("v41_fp4_page_split", "e4m3_scale_floor"),
    "V41_FP4_interleaved_fm": ("v41_fp4_interleaved", "e4m3_scale_floor"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN_RULES)
def test_the_reference_writes_and_reads_golden_caches(name):
    record, rule = kv_format(GOLDEN_RULES[name][0]), GOLDEN_RULES[name][1]
    data = dict(np.load(VECTORS / f"cache_{name}.npz"))
    page_size, row = int(data["page_size"]), record.record_bytes
    pool = torch.from_numpy(data["pool"])
    shape, strides = (len(pool), page_size, 1, row), (pool.stride(0), row, row, 1)
    x = torch.from_numpy(data["x_bf16"].view(np.int16)).view(torch.bfloat16).flatten(0, 1)
    golden = torch.from_numpy(data["dequant_bf16"].view(np.int16)).view(torch.bfloat16).flatten(0, 1)
    slots = torch.arange(len(x))
    found = read_reference(record, {"k_cache": pool.as_strided(shape, strides)}, slots)
    torch.testing.assert_close(found, golden, rtol=0, atol=0, equal_nan=True)
    finite = x.isfinite().all(1)
    ours = pool.clone()
    ours[finite.view(len(pool), -1).all(1)] = 0xFF
    write_reference(record, {"k_cache": ours.as_strided(shape, strides)}, x, slots.masked_fill(~finite, -1), rule)
    assert torch.equal(ours, pool)
