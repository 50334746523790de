"""Several KV heads, and keys and values in tensors of their own: specs, deals, arguments, refusals, the reference."""

import math
from dataclasses import replace

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins, unpack

from dsagen.arch import ARCHS
from dsagen.bench.cases import decode_cases as bench_cases
from dsagen.check.cases import DecodeCase, Lengths, decode_cases
from dsagen.check.inputs import make_inputs
from dsagen.check.probes import CaseRun, reference_of
from dsagen.check.run import KernelCache, run_case
from dsagen.errors import GuardError, SpecError
from dsagen.families.sparse_decode.family import caches_of
from dsagen.families.sparse_decode.geometry import deal_heads, heads_per_cta
from dsagen.families.sparse_decode.op import DecodeShape, partition
from dsagen.families.sparse_decode.reference import Source, read_tokens, sparse_decode_reference
from dsagen.kv_format import kv_format
from dsagen.matrix import expand
from dsagen.runtime.api import Kernels
from dsagen.runtime.sparse_decode import DecodeTensors
from dsagen.spec import DeploymentSpec, load_spec

B, S, H, KV, TOPK, PAGES, PAGE = 2, 3, 8, 2, 40, 4, 5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES"):
        monkeypatch.delenv(name, raising=False)


def spec_of(kv="bf16_kv", **changes):
    given = {"heads": H, "kv_heads": KV, "archs": ["sm_90a"], "ops": ["sparse_decode"], "kv": kv, "topk": 64}
    return DeploymentSpec(**{"model": "custom", **given, **changes})


# ---- specs ----------------------------------------------------------------------------------------------------------


def test_a_spec_says_its_kv_heads_where_there_are_several():
    spec = spec_of()
    assert spec.to_mapping()["kv_heads"] == KV and load_spec(spec.to_mapping()) == spec
    assert "kv_heads" not in spec_of(kv_heads=1).to_mapping()
    assert "kvh.many" in expand(spec).plans()[0].slug and "kvh" not in expand(spec_of(kv_heads=1)).plans()[0].slug


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_heads": 3}, "kv_heads = 3: must divide heads 8: each KV head has as many"),
        ({"kv_heads": 2.0}, "kv_heads = 2.0: is not allowed: must be an integer of 1 .. 128"),
        ({"model": "v4", "kv": "v4"}, "kv_heads = 2: model v4 has one KV head"),
        ({"ops": ["topk"]}, "kv_heads = 2: nothing reads it: add sparse_decode to ops"),
        ({"dims": {"d_qk": 100, "d_v": 128}}, "bf16_kv keys of d_qk 100 and values of d_v 128: both must be multiples"),
        ({"dims": {"d_qk": 128, "d_v": 2048}}, "multiples of 64 up to 1024"),
    ],
)
def test_what_no_spec_of_several_kv_heads_says(changes, text):
    with pytest.raises(SpecError) as error:
        spec_of(**changes)
    assert text in str(error.value)


def test_only_the_ops_that_read_it_keep_it():
    both = spec_of("bf16", ops=["sparse_decode", "topk"])
    assert both.only("sparse_decode").kv_heads == KV and both.only("topk").kv_heads == 1


def test_caches_of_keys_and_values_apart_need_no_writer():
    spec = DeploymentSpec(model="custom", heads=8, archs=["sm_90a"], ops=["kv_cache"], kv="bf16_kv", topk=64)
    (refusal,) = {cell.refusal for cell in expand(spec).refused}
    assert (
        refusal == "bf16_kv_d128_v128: keys and values are stored as they are, each in its tensor: no kernel is needed"
    )


@pytest.mark.parametrize(("name", "dims"), [("bf16_kv", (128, 128)), ("fp16_kv_d192_v256", (192, 256))])
def test_keys_and_values_apart(name, dims):
    record = spec_of(name, dims={"d_qk": dims[0], "d_v": dims[1]}).kv_format
    assert record.format_id.endswith(f"_d{dims[0]}_v{dims[1]}") and kv_format(record.format_id) is record
    assert (record.d_qk, record.d_v, record.row_dims, record.record_bytes) == (*dims, sum(dims), 2 * sum(dims))
    assert record.dim_address(1, 2, dims[0] - 1, 5, 4096).tensor == "k_cache"
    assert record.dim_address(1, 2, dims[0] + 3, 5, 4096).byte == 4096 + 2 * 2 * dims[1] + 6


# ---- deals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [2, 3, 4, 8])
@pytest.mark.parametrize("most", [8, 24, 32, 64])
def test_no_group_is_of_two_kv_heads(kv_heads, most):
    for heads in range(kv_heads, 129, kv_heads):
        groups, group_heads = deal_heads(heads, kv_heads, most)
        assert groups * group_heads * kv_heads == heads and group_heads <= most
        # What the runtime deals for the padded heads of the kernel that was planned is the same.
        assert deal_heads(heads, kv_heads, -(-group_heads // 8) * 8) == (groups, group_heads)


def test_one_kv_head_is_dealt_as_ever():
    assert deal_heads(61, 1, 32) == (2, 31) and deal_heads(128, 1, 64) == (2, 64)


def test_a_deal_in_many_small_parts_is_refused():
    (reason,) = {cell.refusal for cell in expand(spec_of("v32", heads=74, archs=["sm_86"])).refused}
    assert reason.startswith(
        "[SD-27] heads: 74 of 2 KV heads are 37 each, of which a CTA holds 32: equal parts take 37"
    )
    assert heads_per_cta(caches_of("v32"), 72, ARCHS["sm_86"], 2) == 24  # 36 heads as 2 x 18


def test_the_partition_counts_groups_of_all_kv_heads():
    plan = expand(spec_of("v32", heads=128, archs=["sm_86"])).plans()[0]
    part = partition(DecodeShape(3, 1, 128, 256, kv_heads=2), plan, 132, "off", 2)
    assert (part.head_groups, part.kv_head_groups, part.group_heads, part.main_ctas) == (4, 2, 32, 3 * 2 * 4)


# ---- calls ----------------------------------------------------------------------------------------------------------


def kernels_of(spec):
    driver = FakeDriver()
    return driver, Kernels(spec, open_driver=lambda: driver, read=fake_cubins)


def call(spec, pages=PAGES, page_size=PAGE, **changes):
    record, heads = spec.kv_format, spec.kv_heads
    arguments = {
        "q": torch.zeros(B, S, H, record.d_qk).bfloat16(),
        "indices": torch.zeros(B, S, TOPK, dtype=torch.int32),
    }
    for tensor, name in zip(record.tensors, ("k_cache", record.tensors[-1].name), strict=False):
        arguments[name] = torch.zeros(pages, page_size, heads, tensor.columns, dtype=getattr(torch, tensor.dtypes[0]))
    return arguments | changes


def block_of(spec, **changes):
    driver, kernels = kernels_of(spec)
    arguments = call(spec, **changes)
    kernels.sparse_decode(**arguments, plan=kernels.plan_sparse_decode(B, S, TOPK, num_splits=1))
    return arguments, unpack(driver.launches[-1].block, kernels._on(0).mains[0])


def by_kv_head(cache):
    """The same shape, the rows of a page by KV head."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def test_rows_of_a_token_side_by_side():
    given, block = block_of(spec_of())
    assert (block["row_stride_bytes"], block["head_stride_bytes"], block["page_stride_bytes"]) == (512, 256, 2560)
    assert (block["part_row_stride_bytes"], block["part_head_stride_bytes"]) == (512, 256)
    assert (block["kv"], block["kv_part"]) == (given["k_cache"].data_ptr(), given["v_cache"].data_ptr())
    assert (block["head_groups"], block["kv_head_groups"], block["group_heads"]) == (2, 1, 4)
    assert (block["indices_stride_kv"], block["length_stride_kv"], block["pool_tokens"]) == (0, 0, PAGES * PAGE)


def test_rows_of_a_page_by_kv_head_in_either_tensor():
    _, block = block_of(spec_of(), k_cache=by_kv_head(torch.zeros(PAGES, PAGE, KV, 128).bfloat16()))
    assert (block["row_stride_bytes"], block["head_stride_bytes"]) == (256, 256 * PAGE)
    assert (block["part_row_stride_bytes"], block["part_head_stride_bytes"]) == (512, 256)


def test_keys_and_values_that_share_pages():
    """As engines allocate them: a page has its keys, then its values."""
    both = torch.zeros(PAGES, 2, PAGE, KV, 128).bfloat16()
    _, block = block_of(spec_of(), k_cache=both[:, 0], v_cache=both[:, 1])
    assert block["page_stride_bytes"] == block["part_page_stride_bytes"] == 2 * PAGE * KV * 256
    assert block["kv_part"] - block["kv"] == PAGE * KV * 256


def test_scales_behind_the_rows_of_all_kv_heads():
    spec = spec_of("v4")
    given, block = block_of(spec)
    assert (block["row_stride_bytes"], block["head_stride_bytes"]) == (2 * 576, 576)
    assert (block["part_row_stride_bytes"], block["part_head_stride_bytes"]) == (16, 8)
    assert block["kv_part"] == given["k_cache"].data_ptr() + 576 * PAGE * KV


def test_lists_and_lengths_of_each_kv_head():
    own = torch.zeros(B, S, KV, TOPK, dtype=torch.int32)
    lengths = torch.zeros(B, S, KV, dtype=torch.int32)
    _, block = block_of(spec_of(), indices=own, topk_length=lengths)
    assert [block[f"indices_stride_{axis}"] for axis in ("b", "s", "kv")] == [S * KV * TOPK, KV * TOPK, TOPK]
    assert [block[f"length_stride_{axis}"] for axis in ("b", "s", "kv")] == [S * KV, KV, 1]
    _, block = block_of(spec_of(), indices=own, topk_length=lengths[:, 0, 0].contiguous())
    assert [block[f"length_stride_{axis}"] for axis in ("b", "s", "kv")] == [1, 0, 0]


def test_pages_of_one_token_have_one_order():
    _, block = block_of(spec_of(), page_size=1)
    assert (block["row_stride_bytes"], block["head_stride_bytes"]) == (512, 256)


def test_a_second_cache_of_several_kv_heads():
    spec = spec_of("v4", extra_kv={"format": "v4", "topk": 64})
    extra = torch.zeros(3, 7, KV, 584, dtype=torch.uint8)
    driver, kernels = kernels_of(spec)
    lists = torch.zeros(B, S, KV, 11, dtype=torch.int32)
    kernels.sparse_decode(**call(spec), extra_k_cache=extra, extra_indices=lists)
    block = unpack(driver.launches[0].block, kernels._on(0).mains[0])
    assert (block["extra_head_stride_bytes"], block["extra_part_head_stride_bytes"]) == (576, 8)
    assert (block["extra_indices_stride_kv"], block["extra_topk"], block["indices_stride_kv"]) == (11, 11, 0)
    kernels.sparse_decode(**call(spec))
    block = unpack(driver.launches[-1].block, kernels._on(0).mains[0])
    assert block["extra_pool_tokens"] == block["extra_head_stride_bytes"] == block["extra_indices_stride_kv"] == 0


WRONG = {
    "one head": ({"k_cache": torch.zeros(PAGES, PAGE, 1, 128).bfloat16()}, "[T-06] k_cache: 1 KV heads, expected 2: "),
    "no values": ({"v_cache": None}, "[T-17] v_cache: format bf16_kv_d128_v128 keeps values in their own tensor"),
    "rope": ({"kpe_cache": torch.zeros(1)}, "[T-17] kpe_cache: format bf16_kv_d128_v128 has another second tensor"),
    "values' pages": ({"v_cache": torch.zeros(3, PAGE, KV, 128).bfloat16()}, "[SD-17] v_cache: 3 pages of 5 tokens"),
    "every other token": (
        {"k_cache": torch.zeros(PAGES, 2 * PAGE, KV, 128).bfloat16()[:, ::2]},
        "[SD-28] k_cache: token stride 1024 B and KV-head stride 256 B with rows of 256 B",
    ),
    "wide heads": (
        {"v_cache": torch.zeros(PAGES, PAGE, KV, 256).bfloat16()[..., :128]},
        "[SD-28] v_cache: token stride 1024 B and KV-head stride 512 B",
    ),
    "overlapping pages": (
        {"k_cache": torch.zeros(1, PAGE, KV, 128).bfloat16().expand(PAGES, -1, -1, -1)},
        "[SD-12] k_cache: token stride 256 B and page stride 0 B do not hold pages",
    ),
    "lists of another number": (
        {"indices": torch.zeros(B, S, 3, TOPK, dtype=torch.int32)},
        "[T-06] indices: shape (2, 3, 3, 40), expected [batch, s_q, kv_heads, topk] = (2, 3, 2, *)",
    ),
    "lengths of another number": (
        {"topk_length": torch.zeros(B, S, 3, dtype=torch.int32)},
        "[T-06] topk_length: shape (2, 3, 3), expected [batch, s_q, kv_heads] = (2, 3, 2)",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_several_kv_heads(what):
    changes, message = WRONG[what]
    _, kernels = kernels_of(spec_of())
    with pytest.raises(GuardError) as error:
        kernels.sparse_decode(**call(spec_of(), **changes))
    assert str(error.value).startswith(message)


def test_one_kv_head_takes_no_lists_of_kv_heads():
    spec = spec_of(kv_heads=1)
    _, kernels = kernels_of(spec)
    with pytest.raises(GuardError, match=r"^\[T-05\] indices: 4 dims .* expected 3: \[batch, s_q, topk\]"):
        kernels.sparse_decode(**call(spec, indices=torch.zeros(B, S, 1, TOPK, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("place", "value", "lengths", "message"),
    [
        ((1, 2, 1, 7), PAGES * PAGE, None, "[SD-22] indices[1, 2, 1, 7] = 20: k_cache holds 20 tokens"),
        ((1, 2, 1, 7), PAGES * PAGE, (1, 2, 1, 8), "[SD-22] indices[1, 2, 1, 7] = 20"),
        ((1, 2, 1, 7), PAGES * PAGE, (1, 2, 1, 7), ""),
        ((1, 2, 7), PAGES * PAGE, (1, 2, 1, 8), "[SD-22] indices[1, 2, 7] = 20"),
        ((1, 2, 7), PAGES * PAGE, (1, 2, 1, 7), ""),
        ((1, 2, 1, 7), -5, (0, 1, 1, TOPK + 1), "[SD-21] topk_length[0, 1, 1] = 41"),
    ],
)
def test_values_of_lists_are_checked_on_request(place, value, lengths, message, monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    indices = torch.zeros((B, S, KV, TOPK) if len(place) == 4 else (B, S, TOPK), dtype=torch.int32)
    indices[place] = value
    given = None
    if lengths is not None:
        given = torch.zeros(B, S, KV, dtype=torch.int32)
        given[lengths[:3]] = lengths[3]
    _, kernels = kernels_of(spec_of())
    arguments = call(spec_of(), indices=indices, topk_length=given)
    if not message:
        kernels.sparse_decode(**arguments)
        return
    with pytest.raises(GuardError) as error:
        kernels.sparse_decode(**arguments)
    assert str(error.value).startswith(message)


# ---- the reference, and what the check finds ------------------------------------------------------------------------

CASE = DecodeCase(
    "heads", 2, 2, 60, 40, 7, lengths=Lengths.PER_TOKEN, sink=True, wild_ids=True, strided=True, padded_pages=True
)


@pytest.mark.parametrize("own_lists", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("kv", ["bf16_kv", "v4", "bf16_split"])
def test_each_kv_head_is_a_call_of_its_own(kv, by_head, own_lists):
    """The reference, against calls with one KV head over caches that hold that head's rows alone."""
    spec = spec_of(kv, heads=6, kv_heads=3)
    case = replace(CASE, own_lists=own_lists, by_kv_head=by_head)
    found = make_inputs(case, spec.kv_format, (6, 3), CPU, torch.Generator().manual_seed(3))
    whole = reference_of(spec, found)
    for head in range(3):
        record, source = spec.kv_format, found.sources[0].of_kv_head(head)
        pool_tokens = min(cache.shape[0] * cache.shape[1] for cache in source.caches.values())
        rows = read_tokens(record, source.caches, torch.arange(pool_tokens))
        ids = source.indices.masked_fill(source.indices >= pool_tokens, -1)
        own = slice(2 * head, 2 * head + 2)
        lengths = found.topk_length[..., head] if own_lists else found.topk_length
        want = plain_attention(found.q[:, :, own].double(), rows, ids, lengths, found.sm_scale, record)
        sink = found.attn_sink[own].double()
        factor = (1 / (1 + torch.exp(sink - want[1]))).masked_fill(want[1] == -math.inf, 0)
        assert torch.allclose(whole.out.view(2, 2, 6, -1)[:, :, own], want[0] * factor.unsqueeze(3), atol=1e-9)
        lse = want[1].masked_fill(want[1] == -math.inf, math.inf)
        assert torch.allclose(whole.lse.view(2, 2, 6)[:, :, own], lse, atol=1e-9)


def plain_attention(q, rows, ids, lengths, scale, record):
    """(out, natural lse) by one query token after the other, over dequantised rows."""
    out, lse = torch.zeros(*q.shape[:3], record.d_v).double(), torch.full(q.shape[:3], -math.inf).double()
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            live = ids[b, s][: max(0, int(lengths[b, s]))]
            x = rows[live[live >= 0]]
            if len(x):
                logits = q[b, s] @ x[:, : record.d_qk].T * scale
                lse[b, s] = logits.logsumexp(1)
                values = x[:, record.first_value : record.first_value + record.d_v]
                out[b, s] = (logits - lse[b, s].unsqueeze(1)).exp() @ values
    return out, lse


class ModelKernels:
    """The op in torch, with a defect."""

    def __init__(self, spec, defect):
        self.spec, self.defect = spec, defect

    def sparse_decode_workspace_bytes(self, *shape, **options):
        return 0

    def plan_sparse_decode(self, *shape, **options):
        return None

    def sparse_decode(self, q, k_cache, indices, *, plan, topk_length, attn_sink, softmax_scale, out, lse, v_cache):
        swap = {"other rows": "caches", "other lists": "indices", "other lengths": "topk_length"}.get(self.defect)
        tensors = {"caches": {"k_cache": k_cache, "v_cache": v_cache}, "indices": indices, "topk_length": topk_length}
        if swap == "caches":
            tensors[swap] = {name: cache.roll(1, 2) for name, cache in tensors[swap].items()}
        elif swap is not None:
            tensors[swap] = tensors[swap].roll(1, 2)
        if self.defect == "values of other heads":
            tensors["caches"]["v_cache"] = v_cache.roll(1, 2)
        if self.defect == "heads interleaved":
            q = q.unflatten(2, (KV, -1)).transpose(2, 3).flatten(2, 3)
        source = Source(self.spec.kv_format, **tensors)
        found = sparse_decode_reference(
            q, source.record, source.caches, source.indices, sm_scale=softmax_scale, topk_length=source.topk_length,
            attn_sink=attn_sink,
        )  # fmt: skip
        out.copy_(found.out.view(out.shape).bfloat16())
        lse.copy_(found.lse.view(*out.shape[:3]).transpose(1, 2).float())
        return out, lse


@pytest.mark.parametrize(
    "defect", ["", "other rows", "other lists", "other lengths", "values of other heads", "heads interleaved"]
)
def test_a_kernel_that_mistakes_kv_heads_fails(defect):
    kernels = KernelCache(spec_of(), CPU, lambda spec, device: ModelKernels(spec, defect))
    case = replace(CASE, own_lists=True)
    result, _ = run_case(CaseRun(case, kernels, CPU, 5))
    assert result.status == ("failed" if defect else "passed"), result.problem


@pytest.mark.parametrize(("heads", "text"), [(KV, "2 KV heads: such"), (1, "format bf16_kv_d128_v128: such")])
def test_benchmarks_leave_them_out(heads, text):
    with pytest.raises(SpecError, match=text):
        bench_cases(spec_of(kv_heads=heads))


def test_cases_have_shared_and_own_lists_in_either_order_of_rows():
    cases = decode_cases("quick", 64, 512, kv_heads=2)
    assert {(case.own_lists, case.by_kv_head) for case in cases} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert [replace(case, own_lists=False, by_kv_head=False) for case in cases] == list(decode_cases("quick", 64, 1024))
    assert not any(case.own_lists for case in cases if "ramp" in case.name)


def test_tensors_of_a_call_are_in_the_order_of_the_op():
    assert DecodeTensors._fields[-2:] == ("v_cache", "extra_v_cache")
