"""The check itself: it passes a right implementation, and finds every kind of wrong one, on a CPU."""

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from dsagen.check import cases as case_lists
from dsagen.check.cases import DecodeCase, ExtraCase, Ids, Lengths, Probe, Values, decode_cases
from dsagen.check.compare import Gates, compare_decode
from dsagen.check.probes import CaseRun, gates_for
from dsagen.check.report import CheckReport
from dsagen.check.run import KernelCache, cases_of, run_case, run_cases, run_check
from dsagen.errors import CheckFailed, KnobError, SpecError
from dsagen.families.sparse_decode.reference import Source, read_tokens, sparse_decode_reference
from dsagen.kv_format import KV_FORMATS
from dsagen.spec import DeploymentSpec, load_spec, shipped_specs

CPU = torch.device("cpu")


class ModelKernels:
    """The op in torch on a CPU, with bf16 outputs as a kernel has; `defect` makes it wrong in one way."""

    def __init__(self, spec, defect=""):
        self.spec, self.defect, self.calls = spec, defect, 0

    def prepare(self):
        pass

    def sparse_decode_workspace_bytes(self, batch, s_q, topk, *, extra_topk, num_splits):
        return 4 * batch * s_q * (num_splits or 1) if (num_splits or 1) > 1 else 0

    def plan_sparse_decode(self, batch, s_q, topk, *, extra_topk, num_splits, workspace):
        return (batch, s_q, topk, extra_topk), workspace

    def sparse_decode(self, q, k_cache, indices, *, plan, topk_length, attn_sink, softmax_scale, out, lse, **others):
        extra, extra_indices = self.extra_source(**others), others.get("extra_indices")
        assert plan[0] == (*indices.shape, 0 if extra_indices is None else extra_indices.shape[2])
        self.calls += 1
        defect, record = self.defect, self.spec.kv_format
        if len(record.tensors) > 1:
            names = [tensor.name for tensor in record.tensors]
            k_cache = dict(zip(names, (k_cache, others[names[1]]), strict=True))
        rows = k_cache if isinstance(k_cache, torch.Tensor) else k_cache[record.tensors[0].name]
        pool_tokens = rows.shape[0] * rows.shape[1]
        if defect == "ignores length":
            topk_length = None
        if defect == "one length per request":
            topk_length = (
                topk_length[:, 0].contiguous() if topk_length is not None and topk_length.ndim == 2 else topk_length
            )
        if defect == "clamps large ids":
            indices = indices.clamp(max=pool_tokens - 1)
        if defect == "takes id -1 as 0":
            indices = torch.where(indices == -1, indices.new_zeros(()), indices)
        if defect == "drops the last column" and indices.shape[2] > 1:
            indices = indices[..., :-1]
        if defect == "drops duplicates":
            indices = indices.sort(2).values
            indices = torch.where(indices == indices.roll(1, 2), indices.new_full((), -1), indices)
        if defect == "ignores sink":
            attn_sink = None
        base = "e" if defect == "wrong base" else self.spec.lse.base
        empty = math.inf if defect == "wrong empty" else float(self.spec.lse.empty)
        result = sparse_decode_reference(
            q, record, k_cache, indices, sm_scale=softmax_scale * (1.02 if defect == "wrong scale" else 1.0),
            topk_length=topk_length, attn_sink=attn_sink, lse_base=base, empty_lse=empty, extra=extra,
        )  # fmt: skip
        value, total = result.out.view(out.shape), result.lse.view(*out.shape[:3]).transpose(1, 2)
        if defect == "coarse":
            value = value * (1 + 2.0**-6 * torch.randn(value.shape))
        if defect == "one scale group off":
            value = value.clone()
            value[..., 128:256] *= 1.005
        if defect == "swallows NaN":
            value, total = value.nan_to_num(), total.nan_to_num()
        if defect == "sink in lse" and attn_sink is not None:
            total = torch.logaddexp(total, attn_sink.double().view(1, -1, 1))
        if defect.startswith("not deterministic"):
            value = value * (1 + 2.0**-7 * (self.calls % 2))
        if defect == "depends on batch" and indices.shape[0] > 1:
            value = value * (1 + 2.0**-8)
        if defect == "never writes":
            return out, lse
        out.copy_(value.bfloat16())
        lse.copy_(total.float())
        if defect == "overruns out":
            inside = out.storage_offset() + out.stride(0) * (out.shape[0] - 1) + out.stride(2) * (out.shape[2] - 1)
            torch.as_strided(out, (1,), (1,), inside + out.stride(1) * (out.shape[1] - 1) + out.shape[3]).zero_()
        if defect == "overruns workspace" and plan[1] is not None:
            torch.as_strided(plan[1], (1,), (1,), plan[1].storage_offset() + plan[1].numel()).zero_()
        return (out.clone(), lse) if defect == "returns others" else (out, lse)

    def extra_source(self, extra_k_cache=None, extra_indices=None, extra_topk_length=None, **_second):
        """The second cache as this model reads it."""
        if extra_k_cache is None or self.defect == "ignores the second cache":
            return None
        if self.defect == "ignores its length":
            extra_topk_length = None
        if self.defect == "drops its last column":
            extra_indices = torch.cat((extra_indices[..., :-1], torch.full_like(extra_indices[..., :1], -1)), 2)
        if self.defect == "takes its length for the other's":
            extra_topk_length = extra_topk_length.roll(1, 0)
        return Source(self.spec.extra_kv_format, extra_k_cache, extra_indices, extra_topk_length)


def model_of(spec, defect=""):
    return KernelCache(spec, CPU, lambda s, device: ModelKernels(s, defect))


def small_spec(kv="v32", **changes):
    return DeploymentSpec(model="v32", heads=5, archs=["sm_90a"], ops=["sparse_decode"], kv=kv, **changes)


SMALL = DecodeCase("small", 3, 2, 60, 40, 7, lengths=Lengths.PER_TOKEN, sink=True, wild_ids=True, strided=True)


def run_small(case, defect="", kv="v32", seed=1):
    return run_case(CaseRun(case, model_of(small_spec(kv), defect), CPU, seed))[0]


# --- case lists ------------------------------------------------------------------------------------------------------


def test_every_peer_shape_is_in_the_full_tier():
    cases = decode_cases("full", 64, 656)
    found = {(c.kv_tokens, c.topk, c.page_size, c.batch, c.s_q, c.lengths) for c in cases if c.name.startswith("peer")}
    shapes = [
        (512, 64, 2),
        (512, 64, 64),
        (512, 64, 69),
        (1024, 576, 2),
        (1024, 576, 61),
        (2046, 2048, 2),
        (2046, 2048, 64),
    ]
    shapes += [(2046, 2048, 576), (512, 64, 5), (2046, 2048, 1)]
    for shape in shapes:
        for batch in (4, 74, 321):
            for s_q in (1, 3):
                for lengths in (Lengths.NONE, Lengths.PER_REQUEST):
                    assert (*shape, batch, s_q, lengths) in found
    fixed = {(c.kv_tokens, c.topk, c.page_size) for c in cases if c.name.endswith("fixed") and not c.varying}
    assert fixed == set(shapes)
    corners = {
        (c.kv_tokens, c.topk, c.page_size, c.batch, c.ids is Ids.ALL_INVALID, c.empty_requests, c.sink)
        for c in cases
        if c.name.startswith("corner")
    }
    assert len(corners) == 2 * 4 * 8


@pytest.mark.parametrize("tile_tokens", [16, 64, 128])
def test_adversarial_list_is_complete(tile_tokens):
    cases = decode_cases("quick", tile_tokens, 656)
    assert {c.topk for c in cases if c.name.startswith("width")} >= {1, 63, 65, 2047}
    assert {c.page_size for c in cases} >= {1, 2, 5, 48, 61, 64, 69, 256, 576}
    assert {c.ids for c in cases} == set(Ids)
    assert {c.values for c in cases} == set(Values)
    assert {c.probe for c in cases} == set(Probe)
    assert {c.lengths for c in cases} == set(Lengths)
    forced = {c.num_splits for c in cases}
    assert {1, 2, 3, 7, 32} <= forced and max(n or 0 for n in forced) > 256
    # A forced number of splits must be legal: each holds a token.
    assert all(tile_tokens * (c.num_splits - 1) < c.topk for c in cases if c.num_splits)
    assert {c.lse for c in cases if c.lse} >= {(2, "-inf"), (2, "+inf"), ("e", "-inf")}


def test_kernels_that_read_nan_codes_as_numbers_are_spared_nan():
    assert any(c.values is Values.NAN_SELECTED for c in cases_of(small_spec(), "sm_90a", "quick"))
    old = DeploymentSpec(model="v32", heads=5, archs=["sm_80"], ops=["sparse_decode"])
    assert not any(c.values is Values.NAN_SELECTED for c in cases_of(old, "sm_80", "quick"))


def test_large_cases_pass_the_32_bit_limits():
    large = [c for c in decode_cases("full", 64, 656) if c.name.startswith("large")]
    assert any(c.kv_tokens * 656 > 2**32 for c in large)
    assert any(c.batch > 65535 for c in large) and any(c.s_q > 65535 for c in large)


@pytest.mark.parametrize("tier", case_lists.TIERS)
def test_names_are_distinct(tier):
    names = [c.name for c in decode_cases(tier, 64, 656)]
    assert len(set(names)) == len(names)


# --- a right implementation passes -----------------------------------------------------------------------------------


def cpu_cases():
    """The quick tier, shortened where a CPU would take long; what is CUDA's own is left out."""
    kept = []
    for case in decode_cases("quick", 16, 656):
        if case.probe in (Probe.GRAPH, Probe.SIDE_STREAM, Probe.OTHER_DEVICE) or case.rows * case.topk > 5000:
            continue
        kept.append(case)
    return kept


@pytest.mark.parametrize("kv", ["v32", "bf16"])
def test_a_right_implementation_passes(kv):
    cases = cpu_cases()
    assert len(cases) > 60
    results = run_cases(cases, model_of(small_spec(kv)), CPU, seed=11)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []


@pytest.mark.parametrize("kv", [name for name in KV_FORMATS if name not in ("v32", "bf16")])
@pytest.mark.parametrize("values", list(Values))
def test_other_formats_pass(kv, values):
    spec = DeploymentSpec(model="custom", heads=5, archs=["sm_90a"], ops=["sparse_decode"], kv=kv, topk=64)
    ids = Ids.SHARED if values in (Values.RAMP_UP, Values.RAMP_DOWN) else Ids.RANDOM
    case = replace(SMALL, values=values, ids=ids, topk=130, kv_tokens=140)
    result, _ = run_case(CaseRun(case, model_of(spec), CPU, 4))
    assert (result.status, result.problem) == ("passed", "")


TWO_CACHES = {"topk": 64, "extra_kv": {"format": "v41_fp4", "topk": 64}}
EXTRA = ExtraCase(90, 50, 3, lengths=Lengths.PER_TOKEN)


def two_caches(defect=""):
    spec = DeploymentSpec(model="v41", heads=5, archs=["sm_90a"], ops=["sparse_decode"], **TWO_CACHES)
    return model_of(spec, defect)


@pytest.mark.parametrize("values", list(Values))
def test_two_caches_pass(values):
    ids = Ids.SHARED if values in (Values.RAMP_UP, Values.RAMP_DOWN) else Ids.RANDOM
    case = replace(SMALL, values=values, ids=ids, extra=replace(EXTRA, ids=ids))
    result, _ = run_case(CaseRun(case, two_caches(), CPU, 4))
    assert (result.status, result.problem) == ("passed", "")


@pytest.mark.parametrize(
    "defect",
    ["ignores the second cache", "ignores its length", "drops its last column", "takes its length for the other's"],
)
def test_a_second_cache_that_is_read_wrongly_is_found(defect):
    last = replace(EXTRA, ids=Ids.LAST_VALID, lengths=Lengths.NONE)
    case = replace(SMALL, extra=last if defect == "drops its last column" else EXTRA)
    assert run_case(CaseRun(case, two_caches(), CPU, 4))[0].status == "passed"
    assert run_case(CaseRun(case, two_caches(defect), CPU, 4))[0].status == "failed"


@pytest.mark.parametrize("tier", case_lists.TIERS)
def test_cases_of_two_caches_are_those_of_one_with_a_second_and_some_more(tier):
    one, two = decode_cases(tier, 64, 656), decode_cases(tier, 64, 656, two_caches=True)
    assert {c.name for c in one} < {c.name for c in two} and len({c.name for c in two}) == len(two)
    assert {c.name.split(".")[0] for c in two} - {c.name.split(".")[0] for c in one} == {"extra"}
    with_both = [c for c in two if c.extra]
    assert len(with_both) > len(two) / 2 and any(not c.extra for c in two)
    assert {c.extra.page_size for c in with_both} >= {1, 2, 5, 64, 69, 123}
    assert {c.extra.lengths for c in with_both} == set(Lengths)
    for case in with_both:
        tiles = -(-case.topk // 64) + -(-case.extra_topk // 64)
        assert (case.num_splits or 1) <= tiles


def test_the_same_seed_draws_the_same_and_another_seed_does_not():
    spec = small_spec()
    runs = [CaseRun(SMALL, model_of(spec), CPU, seed) for seed in (5, 5, 6)]
    q = [run.inputs(run.kernels(SMALL)).q for run in runs]
    assert torch.equal(q[0], q[1]) and not torch.equal(q[0], q[2])


# --- wrong ones do not -----------------------------------------------------------------------------------------------

DEFECTS = {
    "ignores length": SMALL,
    "one length per request": SMALL,
    "clamps large ids": replace(SMALL, lengths=Lengths.NONE),
    "takes id -1 as 0": replace(SMALL, wild_ids=False, lengths=Lengths.NONE),
    "drops the last column": replace(SMALL, lengths=Lengths.NONE, ids=Ids.LAST_VALID),
    "drops duplicates": replace(SMALL, ids=Ids.DUPLICATES, lengths=Lengths.NONE),
    "ignores sink": SMALL,
    "sink in lse": replace(SMALL, lengths=Lengths.NONE),
    "wrong base": replace(SMALL, lse=(2, "+inf")),
    "wrong empty": replace(SMALL, lse=("e", "-inf"), ids=Ids.ALL_INVALID),
    "wrong scale": replace(SMALL, values=Values.PEAKED),
    "coarse": SMALL,
    "one scale group off": SMALL,
    "swallows NaN": replace(SMALL, values=Values.NAN_SELECTED, lengths=Lengths.NONE),
    "never writes": SMALL,
    "not deterministic": replace(SMALL, probe=Probe.REPEATED),
    "not deterministic, packed": replace(SMALL, probe=Probe.REPEATED, strided=False),
    "depends on batch": replace(SMALL, probe=Probe.BATCH_INVARIANT, lengths=Lengths.NONE),
    "overruns out": replace(SMALL, strided=False),
    "overruns workspace": replace(SMALL, num_splits=2),
    "returns others": SMALL,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_implementation_fails(defect):
    case = DEFECTS[defect]
    assert run_small(case).status == "passed"
    result = run_small(case, defect)
    assert result.status == "failed" and result.problem


def test_overrun_between_strided_rows_is_seen():
    result = run_small(SMALL, "overruns out")
    assert result.status == "failed" and result.problem.startswith("out: 1 elements outside")


def test_the_first_wrong_element_is_named():
    result = run_small(SMALL, "coarse")
    assert "elements off, first (" in result.problem and "expected" in result.problem


def test_a_relative_error_below_the_absolute_gate_is_found_by_the_group_gate():
    # Values are so small that 0.5 % of them passes the absolute gate; only the Frobenius gate sees it.
    case = replace(SMALL, values=Values.NORMAL, topk=300, kv_tokens=400, lengths=Lengths.NONE)
    result = run_small(case, "one scale group off")
    assert result.status == "failed" and "dims 128..255" in result.problem and "Frobenius" in result.problem


@pytest.mark.parametrize(("off", "passes"), [(2.0**-8, True), (0.0048, False)])
def test_one_token_rounded_as_far_as_it_goes_passes_as_a_group(off, passes):
    # All of a group's power in a row of one token: its probability, then each output by itself, are rounded to bf16.
    values = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lse, gates = torch.zeros(1, 4, dtype=torch.float64), Gates(out_abs=1.0, out_cos=1.0)
    compared = compare_decode((values * (1 + off)).bfloat16(), lse.float(), values, lse, 128, gates)
    assert compared.passed is passes, compared.problem


def test_unselected_tokens_are_poison():
    spec = small_spec()
    run = CaseRun(replace(SMALL, values=Values.NORMAL), model_of(spec), CPU, 3)
    inputs = run.inputs(run.kernels(SMALL))
    record, cache = inputs.record, inputs.caches["k_cache"]
    rows = read_tokens(record, cache, torch.arange(cache.shape[0] * cache.shape[1]))
    bad = rows.isnan().any(1) | (rows.abs() > 1e30).any(1)
    live = torch.arange(SMALL.topk) < inputs.topk_length.clamp(0, SMALL.topk).view(SMALL.batch, SMALL.s_q, 1)
    valid = (inputs.indices >= 0) & (inputs.indices < bad.numel()) & live
    selected = torch.zeros_like(bad)
    selected[inputs.indices[valid].long()] = True
    assert not bad[selected].any() and bad[~selected].all() and selected.any() and (~selected).any()


# --- comparator ------------------------------------------------------------------------------------------------------


def exact(rows=3, heads=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, heads, 256, generator=generator).double(), torch.randn(
        rows, heads, generator=generator
    ).double()


def verdict(change_out=None, change_lse=None, **want):
    out, lse = exact()
    got_out, got_lse = out.clone(), lse.clone()
    for name, value in want.items():
        (out if name.startswith("out") else lse)[0, 0] = value
    if change_out:
        change_out(got_out)
    if change_lse:
        change_lse(got_lse)
    return compare_decode(got_out, got_lse, out, lse, 128, Gates())


def test_equal_data_passes_with_zero_errors():
    result = verdict()
    assert result.passed and result.problem == ""
    assert (result.out.worst_abs, result.out.cos, result.out.worst_group, result.lse.worst_abs) == (0, 0, 0, 0)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_places_of_nan_and_infinity_must_agree(special):
    def put(x):
        x[0, 0] = special

    assert "NaN or infinity" in verdict(change_out=put).out.problem
    assert "NaN or infinity" in verdict(change_lse=put).lse.problem
    assert "NaN or infinity" in verdict(out=special).out.problem
    assert verdict(change_lse=put, lse=special).passed
    assert not verdict(change_lse=put, lse=-special if not math.isnan(special) else math.inf).passed


def test_one_element_off_is_found_and_named():
    def bump(x):
        x[1, 1, 200] += 0.5

    assert "1 of 1536 elements off, first (1, 1, 200)" in verdict(change_out=bump).problem


def test_either_gate_lets_an_element_pass():
    def add(amount):
        return lambda x: x.add_(amount)

    assert verdict(change_out=add(9e-4)).passed
    assert not verdict(change_out=lambda x: x.mul_(1.02)).passed
    assert not verdict(change_lse=add(2e-3)).passed


def test_a_large_lse_is_held_to_an_absolute_limit():
    out, lse = exact()
    big = compare_decode(out, lse + 50.002, out, lse + 50, 128, Gates())
    assert not big.passed and "absolute error 0.002" in big.lse.problem
    assert compare_decode(out, lse + 50.002, out, lse + 50, 128, Gates().for_peak(1000.0), out.abs()).lse.passed


def test_wrong_shapes_fail():
    out, lse = exact()
    assert "shape" in compare_decode(out[:2], lse, out, lse, 128, Gates()).problem


def test_gates_widen_with_the_logits_only_where_they_must():
    assert gates_for(Values.NORMAL, 1e4) == Gates()
    peaked = gates_for(Values.PEAKED, 16.0)
    assert replace(peaked, lse_abs=Gates().lse_abs, out_abs_rms=0.0) == Gates()
    assert peaked.lse_abs < 1e-4 and peaked.out_abs_rms == 2 * 2.0**-8
    assert gates_for(Values.HUGE, 1e4).group_error < 0.1


# --- runs and reports ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_without_a_device_nothing_counts_as_passed():
    report = run_check("v32_h16", "full", seed=7)
    assert report.device is None and report.results and report.count("passed") == 0
    assert report.count("not_run") == len(report.results) and not report.conformant
    assert [r.status for r in report.host_results] == ["passed"] * 3
    assert f"{len(report.results)} did not run" in report.summary() and "no CUDA device" in report.summary()
    assert report.to_json()["counts"] == {"passed": 0, "failed": 0, "not_run": len(report.results)}


def test_a_failed_report_raises_and_says_how_to_replay():
    spec = small_spec()
    results = run_cases([SMALL], model_of(spec, "coarse"), CPU, seed=42)
    report = run_check(spec, seed=42) if not torch.cuda.is_available() else None
    if report is not None:
        with pytest.raises(CheckFailed, match="--seed 42") as caught:
            replace(report, results=results).require_passed()
        assert "small" in str(caught.value) and caught.value.exit_code == 4
        report.require_passed()


def test_a_fault_stops_the_run_and_the_rest_counts_as_not_run():
    class Faulty(ModelKernels):
        def sparse_decode(self, *args, **kwargs):
            raise RuntimeError("an illegal memory access was encountered")

    spec = small_spec()
    kernels = KernelCache(spec, CPU, lambda s, device: Faulty(s))
    first, second = run_cases([SMALL, replace(SMALL, name="next")], kernels, CPU, seed=1)
    assert first.status == "failed" and "illegal memory access" in first.problem
    assert second.status == "not_run" and "faulted in small" in second.problem


def test_report_prints_failures_and_what_did_not_run():
    kernels = model_of(small_spec(), "coarse")
    results = run_cases([SMALL, replace(SMALL, name="run.graph", probe=Probe.GRAPH)], kernels, CPU, seed=1)
    report = CheckReport("mine", "quick", 1, "a device", "", results, ())
    stream = io.StringIO()
    report.print(Console(file=stream, width=200))
    text = stream.getvalue()
    assert "elements off" in text and "1 device case did not run: needs a CUDA device" in text
    assert "0 of 2 device cases passed, 1 failed, 1 did not run" in text


def test_unknown_case_pattern_is_refused():
    with pytest.raises(SpecError, match="no case of the quick tier matches 'nosuch"):
        cases_of(small_spec(), "sm_90a", "quick", "nosuch*")


def test_index_checks_are_refused(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    with pytest.raises(KnobError, match="DSAGEN_CHECK_INDICES"):
        run_check("v32_h16")


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_specs_have_cases(name):
    spec = load_spec(name)
    assert cases_of(spec, spec.archs[0], "quick")
