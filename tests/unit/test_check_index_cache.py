"""The check of the index cache's ops: a right implementation passes every case, each wrong one fails, on the CPU."""

import pytest
import torch

from dsagen.check.cache_inputs import copy_of, whole
from dsagen.check.index_cases import FAR_PAD_BYTES, FAR_PAGES, PADS, PAGE_SIZES, Action, IndexCacheCase, index_cases
from dsagen.check.index_run import IndexCacheRun
from dsagen.check.kv_cases import Contents, Probe
from dsagen.check.probes import WrongResultError
from dsagen.check.run import KernelCache, cases_of, run_cases, run_check
from dsagen.families.index_cache.reference import gather_reference, write_reference
from dsagen.families.kv_cache.reference import table_slots
from dsagen.index_format import INDEX_FORMATS, index_format
from dsagen.index_rule import index_rules_of
from dsagen.spec import load_spec

CPU = torch.device("cpu")
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["index_cache"], "index": {"heads": 8}}


class ModelIndexCache:
    """The ops by their references, with a defect where one is named."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def index_write(self, keys, k_cache, slots):
        record, rule = index_format(self.spec.index.keys), self.spec.index_write.rule
        self.calls += 1
        if self.defect == "another rule":
            rule = next(other for other in index_rules_of(record) if other != rule)
        if self.defect == "takes low bits of slots":
            slots = slots.int()
        if self.defect == "takes the last keys":
            keys = keys[len(keys) - len(slots) :]
        if self.defect == "stores infinities":
            keys = keys.nan_to_num(0.0)
        if self.defect == "assumes pages without padding":
            size, _, columns = k_cache.shape[1:]
            k_cache = k_cache.as_strided(k_cache.shape, (size * columns, columns, columns, 1))
        write_reference(record, k_cache, keys, slots, rule)
        if self.defect == "writes the padding":
            whole(k_cache)[-1] = 0
        if self.defect == "is not the same each time" and self.calls > 3:
            whole(k_cache)[0] ^= 1

    def index_gather(self, k_cache, block_table, row_starts, rows, *, token_starts, codes, scales):
        record, dim = index_format(self.spec.index.keys), self.spec.index.dim
        if self.defect == "ignores token_starts":
            token_starts = None
        slots = table_slots(block_table, row_starts, token_starts, k_cache.shape[1], rows)
        found, words = gather_reference(record, k_cache, dim, slots)
        none = (slots < 0) | (slots >= k_cache.shape[0] * k_cache.shape[1])
        if self.defect == "leaves rows without a key":
            found[none] = codes.view(torch.uint8)[none]
        if self.defect == "leaves scales without a key":
            words[none] = 127
        codes.copy_(found)
        scales.view(torch.int32).copy_(words.view(torch.int32).squeeze(1))
        if self.defect == "writes past the row":
            codes.as_strided((1,), (1,), codes.storage_offset() + codes.shape[1]).fill_(0)
        if self.defect == "writes between scales":
            scales.as_strided((1,), (1,), scales.storage_offset() + 1).fill_(0)
        return (codes.clone(), scales) if self.defect == "returns another tensor" else (codes, scales)


def results_of(cases, defect="", **changes):
    spec = load_spec({**SPEC, **changes})
    kernels = KernelCache(spec, CPU, lambda s, device: ModelIndexCache(s, defect))
    return run_cases(cases, kernels, CPU, seed=3)


def cpu_cases():
    return [case for case in index_cases("quick") if case.probe is not Probe.GRAPH]


@pytest.mark.parametrize("keys", INDEX_FORMATS)
def test_a_right_implementation_passes(keys):
    index = {"heads": 8, "keys": keys, "dim": 64 if keys == "mxfp8" else 128}
    results = results_of(cpu_cases(), index=index, index_write={"rows": "fp32" if keys == "fp8" else "bf16"})
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) >= 50 and {r.op for r in results} == {"index_cache"}


def test_the_lists_are_complete():
    quick, full = index_cases("quick"), index_cases("full")
    assert set(quick) < set(full) and len({case.name for case in full}) == len(full)
    assert all(case.name.startswith("index.") for case in full)
    assert {c.contents for c in quick if c.action is Action.WRITE} == set(Contents)
    for action in Action:
        mine = [case for case in quick if case.action is action]
        assert {c.probe for c in mine} == set(Probe) and {c.page_size for c in mine} >= set(PAGE_SIZES)
        assert {c.pad_bytes for c in mine} >= set(PADS)
    assert {c.wide_slots for c in quick} == {True, False} == {c.strided for c in quick}
    assert FAR_PAGES * FAR_PAD_BYTES > 2**32 and any(case.pad_bytes == FAR_PAD_BYTES for case in full)


PLACED = IndexCacheCase("index.x", Action.WRITE, rows=60, pages=30, pad_bytes=32)
# Nothing is written to slot 0, where the low bits of others lead.
SPARSE = IndexCacheCase("index.sparse", Action.WRITE, rows=20, pages=400)
GATHER = IndexCacheCase("index.x", Action.GATHER, rows=60)
STRIDED = IndexCacheCase("index.x", Action.GATHER, rows=60, strided=True)


@pytest.mark.parametrize(
    ("defect", "case", "problem"),
    [
        ("another rule", PLACED, "k_cache: byte "),
        ("takes low bits of slots", SPARSE, "k_cache: byte "),
        ("takes the last keys", IndexCacheCase("index.x", Action.WRITE, spare_keys=5), "k_cache: byte "),
        ("stores infinities", IndexCacheCase("index.x", Action.WRITE, contents=Contents.SPECIAL), "k_cache: byte "),
        ("assumes pages without padding", PLACED, "k_cache: byte "),
        ("writes the padding", PLACED, "k_cache: byte 691 of page 29 is 0x00, expected 0x7f; 1 bytes differ"),
        ("is not the same each time", IndexCacheCase("index.x", Action.WRITE, probe=Probe.REPEATED), "k_cache: byte 0"),
        ("ignores token_starts", GATHER, "codes: byte "),
        ("leaves rows without a key", GATHER, "codes: byte "),
        ("leaves scales without a key", GATHER, "scales: byte "),
        ("writes past the row", STRIDED, "codes: byte 128 of page 0 is 0x00, expected 0xa5; 1 bytes differ"),
        ("writes between scales", STRIDED, "scales: byte 4 of page 0 is 0x00, expected 0xa5; 4 bytes differ"),
        ("returns another tensor", GATHER, "the op did not return the outputs that it was given"),
    ],
)
def test_a_wrong_implementation_fails(defect, case, problem):
    (right,) = results_of([case])
    assert right.status == "passed", right.problem
    (result,) = results_of([case], defect)
    assert result.status == "failed" and result.problem.startswith(problem), result.problem


def test_slot_0_of_the_sparse_case_is_free():
    spec = load_spec(SPEC)
    call = IndexCacheRun(SPARSE, lambda _: ModelIndexCache(spec), CPU, seed=3).make_call(spec)
    assert not (call.inputs["slots"] == 0).any() and (call.inputs["slots"].int() == 0).any()


@pytest.mark.parametrize("rule", index_rules_of(index_format("mxfp4"))[1:])
def test_every_other_rule_of_mxfp4_is_noticed(rule):
    """Ties and tiny keys tell the rules apart."""
    cases = [IndexCacheCase(f"index.{c}", Action.WRITE, contents=c) for c in (Contents.TIES, Contents.ZEROS)]
    index = {"heads": 8, "keys": "mxfp4"}
    kernels = ModelIndexCache(load_spec({**SPEC, "index": index, "index_write": {"rule": rule}}))
    checked = load_spec({**SPEC, "index": index})
    found = []
    for case in cases:
        run = IndexCacheRun(case, lambda _: kernels, CPU, seed=3)
        call = run.make_call(checked)
        before = copy_of(call.cache)
        run.call(kernels, call)
        try:
            run.compare(checked, call, before)
        except WrongResultError as error:
            found.append(str(error))
    assert found and all(text.startswith("k_cache: byte ") for text in found)


def test_graphs_do_not_run_without_a_device():
    cases = [case for case in index_cases("quick") if case.probe is Probe.GRAPH]
    assert len(cases) == 2 and {(r.status, r.problem) for r in results_of(cases)} == {
        ("not_run", "needs a CUDA device")
    }


def test_replayed_contents_are_others_of_the_same_shapes():
    spec = load_spec(SPEC)
    for case in index_cases("quick"):
        if case.probe is not Probe.GRAPH:
            continue
        kernels = ModelIndexCache(spec)
        run = IndexCacheRun(case, lambda _, own=kernels: own, CPU, seed=3)
        call, other = run.make_call(spec), run.make_call(spec, variation=1)
        assert any(not torch.equal(call.inputs[name], other.inputs[name]) for name in call.inputs)
        run.call(kernels, call)
        call.copy_from(other)
        before = copy_of(call.cache)
        run.call(kernels, call)
        run.compare(spec, call, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_spec_is_checked_op_by_op():
    report = run_check(load_spec({**SPEC, "ops": ["indexer_logits", "index_cache"]}), seed=1)
    assert [(r.name, r.status) for r in report.host_results] == [
        ("host.every cell renders", "passed"),
        ("host.index-key rule is its arithmetic", "passed"),
    ]
    assert report.of_op("index_cache").count("not_run") == len(index_cases("quick"))
    chosen = cases_of(load_spec(SPEC), "sm_90a", "quick", "index.gather.page*")
    assert len(chosen) == len(PAGE_SIZES) * len(PADS)
