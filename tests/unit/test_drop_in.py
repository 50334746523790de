"""The modules that stand in for flash_mla: what they export, whose kernels serve a call, and what they refuse."""

import inspect
import struct
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins

import dsagen.compat.deployments as deployments
from dsagen.compat import flash_mla, flash_mla_legacy
from dsagen.compat.decode import DEPLOYMENTS, NEWER, OLDER
from dsagen.compat.deployments import Need, derived_spec
from dsagen.errors import FrozenError, GuardError
from dsagen.kv_format import kv_format
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

MODULES = {"newer": flash_mla, "older": flash_mla_legacy}


def make(spec="v32_h64", **changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=128))
    spec = load_spec(spec).replace(**changes)
    return driver, Kernels(spec, open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture(autouse=True)
def served():
    DEPLOYMENTS.forget()
    driver, kernels = make()
    flash_mla.use(kernels)
    yield driver, kernels
    DEPLOYMENTS.forget()


def call(heads=64, topk=64, s_q=1, batch=2):
    return {
        "q": torch.zeros(batch, s_q, heads, 576).bfloat16(),
        "k_cache": torch.zeros(4, 64, 1, 656, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.zeros(batch, s_q, topk, dtype=torch.int32),
    }


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]


# Names, order and defaults are what engines call by.
COMMON = [
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
    *("softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"),
    *("extra_indices_in_kvcache", "topk_length", "extra_topk_length"),
]
NEW = ["enable_batch_invariant", "use_legacy", "kv_format", "descale_q", "descale_k"]


def test_signatures():
    older, newer = (inspect.signature(m.flash_mla_with_kvcache).parameters for m in (flash_mla_legacy, flash_mla))
    assert list(older) == [*COMMON, "kv_format", "out"] and list(newer) == [*COMMON, *NEW, "out"]
    for parameters in (older, newer):
        by_name = [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        assert by_name == ["out"]
    for parameters, is_fp8 in ((older, False), (newer, None)):
        defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
        expected = dict.fromkeys(list(parameters)[6:]) | {"causal": False, "is_fp8_kvcache": is_fp8}
        if parameters is newer:
            expected |= {"enable_batch_invariant": False, "use_legacy": False}
        assert defaults == expected


def test_each_is_usable_as_flash_mla(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    import flash_mla as imported
    from flash_mla import flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

    assert set(imported.__all__) <= set(vars(imported))
    meta, splits = get_mla_metadata(torch.zeros(2), 64, num_heads_k=1, is_fp8_kvcache=True)
    assert splits is None and not meta.have_initialized and meta.config is None
    out, lse = flash_mla_with_kvcache(**call() | {"tile_scheduler_metadata": meta}, num_splits=splits)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 1, 64, 512), torch.bfloat16, (2, 64, 1), torch.float32)
    assert meta.have_initialized and (meta.config.b, meta.config.topk, meta.config.h_q) == (2, 64, 64)
    for other in (flash_attn_varlen_func, flash_mla_sparse_fwd):
        with pytest.raises(GuardError, match=rf"^\[T-20\] {other.__name__}: op: not built"):
            other(1, 2, x=3)


def test_a_destination_may_be_given(module):
    """By engines whose own flash_mla takes one; theirs is a part of a wider tensor."""
    wide = torch.zeros(2, 1, 80, 512, dtype=torch.bfloat16)
    for _ in range(2):
        out, lse = module.flash_mla_with_kvcache(**call(), out=wide[:, :, :64])
        assert out.data_ptr() == wide.data_ptr() and out.stride() == (80 * 512, 80 * 512, 512, 1)
        assert lse.shape == (2, 64, 1)
    with pytest.raises(GuardError, match=r"^\[T-06\] out: shape"):
        module.flash_mla_with_kvcache(**call(), out=wide)


def test_a_compiled_call_is_one_graph(module):
    torch._dynamo.reset()
    given = call()
    del given["tile_scheduler_metadata"]

    def step(q, out):
        meta, splits = module.get_mla_metadata()
        result = module.flash_mla_with_kvcache(
            **given | {"q": q * 2}, tile_scheduler_metadata=meta, num_splits=splits, out=out
        )
        return result[0] + 1, result[1]

    for out in (None, torch.zeros(2, 1, 64, 512).bfloat16()):
        want = step(given["q"], out)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(given["q"], out)
        assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in want]


def test_the_scale_is_that_of_the_query_unless_given(module, served):
    driver, kernels = served
    for scale, expected in ((None, 576**-0.5), (0.25, 0.25)):
        module.flash_mla_with_kvcache(**call(), softmax_scale=scale)
        plans = {plan.symbol: plan for plan in kernels._on(0).plans}
        record = next(record for record in driver.launches if "main" in record.symbol)
        field = next(f for f in plans[record.symbol].params if f.name == "scale_log2")
        (found,) = struct.unpack_from("<f", record.block, field.offset_bytes)
        assert found == pytest.approx(expected * 1.4426950408889634, rel=1e-6)
        del driver.launches[:]


def test_metadata_keeps_calls_to_one_shape(module):
    first = call()
    module.flash_mla_with_kvcache(**first)
    meta = {"tile_scheduler_metadata": first["tile_scheduler_metadata"]}
    module.flash_mla_with_kvcache(**call() | meta)
    pages = {"k_cache": torch.zeros(4, 61, 1, 656).byte()}
    for other, field in (
        (call(batch=3), "b 2, this call has 3"),
        (call(topk=128), "topk 64, this call has 128"),
        (call(s_q=2), "s_q 1, this call has 2"),
        (call() | pages, "page_block_size 64, this call has 61"),
    ):
        with pytest.raises(GuardError, match=rf"\[T-20\] .*tile_scheduler_metadata: made for {field}"):
            module.flash_mla_with_kvcache(**other | meta)


def test_a_refused_call_fixes_no_shape(module):
    meta = flash_mla.get_mla_metadata()[0]
    with pytest.raises(GuardError, match=r"^\[T-06\] indices: shape"):
        wrong = {"indices": torch.zeros(3, 1, 64, dtype=torch.int32), "tile_scheduler_metadata": meta}
        module.flash_mla_with_kvcache(**call() | wrong)
    assert not meta.have_initialized
    module.flash_mla_with_kvcache(**call() | {"tile_scheduler_metadata": meta})


NESTED = torch.nested.nested_tensor([torch.zeros(1, 64, 576)] * 2)
REFUSED = {
    "indices": ({"indices": None}, "indices: None asks for dense decode"),
    "causal": ({"causal": True}, "causal: True means nothing beside indices"),
    "fp8": ({"is_fp8_kvcache": False}, "is_fp8_kvcache: False"),
    "head_dim_v": ({"head_dim_v": 576}, "head_dim_v: 576"),
    "metadata": ({"tile_scheduler_metadata": torch.zeros(2, 8)}, "tile_scheduler_metadata: Tensor"),
    "splits": ({"num_splits": torch.zeros(3)}, "num_splits: expected None"),
    "q": ({"q": None}, "q: expected a torch.Tensor, found NoneType"),
    "q dims": ({"q": torch.zeros(2, 64, 576)}, "q: 3 dims"),
    "k_cache dims": ({"k_cache": torch.zeros(4, 64, 656)}, "k_cache: 3 dims"),
    "indices dims": ({"indices": torch.zeros(2, 64).int()}, "indices: 2 dims"),
    "bytes": ({"k_cache": torch.zeros(4, 64, 1, 600).byte()}, "k_cache: 600 B a token beside a q of 576 dims"),
    "q without values": ({"q": NESTED}, "q: a tensor of layout nested: pass a plain strided one"),
    "kv_format of a kind": ({"kv_format": ["V32"]}, "kv_format: ['V32']: expected one of V32, V32_NO_ROPE, V4"),
    "kv_format": ({"kv_format": "V5"}, "kv_format: 'V5': expected one of V32, V32_NO_ROPE, V4, V41, V41_FP4"),
    "extra ids": ({"extra_k_cache": torch.zeros(1, 1, 1, 656)}, "extra_indices_in_kvcache: it and extra_k_cache"),
    "extra cache": ({"extra_indices_in_kvcache": torch.zeros(1)}, "extra_indices_in_kvcache: it and extra_k_cache"),
    "extra length": ({"extra_topk_length": torch.zeros(2)}, "extra_topk_length: there is no extra_k_cache"),
    "extra dims": (
        {"extra_k_cache": torch.zeros(1, 1, 656), "extra_indices_in_kvcache": torch.zeros(2, 1, 8).int()},
        "extra_k_cache: 3 dims",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named(module, served, name):
    driver, _ = served
    change, message = REFUSED[name]
    with pytest.raises(GuardError) as error:
        module.flash_mla_with_kvcache(**call() | change)
    assert str(error.value).startswith(f"[T-20] flash_mla_with_kvcache: {message}")
    assert driver.launches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"descale_q": torch.ones(1)}, "descale_q: belongs to dense decode of FP8"),
        ({"descale_k": torch.ones(1)}, "descale_k: belongs to dense decode of FP8"),
        ({"use_legacy": True, "enable_batch_invariant": True}, "enable_batch_invariant: not together with use_legacy"),
    ],
)
def test_what_only_the_newer_one_can_be_asked(change, message):
    with pytest.raises(GuardError) as error:
        flash_mla.flash_mla_with_kvcache(**call() | change)
    assert str(error.value).startswith(f"[T-20] flash_mla_with_kvcache: {message}")


def test_what_the_op_refuses_is_refused_by_its_own_guards(module):
    with pytest.raises(GuardError, match=r"^\[T-06\] indices: shape"):
        module.flash_mla_with_kvcache(**call() | {"indices": torch.zeros(3, 1, 64, dtype=torch.int32)})
    with pytest.raises(GuardError, match=r"^\[T-06\] q: shape"):
        module.flash_mla_with_kvcache(**call() | {"q": call()["q"][..., :0], "kv_format": "V32"})
    with pytest.raises(GuardError, match=r"^\[T-12\] head_dim_v: expected a whole number, found 512.0"):
        module.flash_mla_with_kvcache(**call() | {"head_dim_v": 512.0})
    with pytest.raises(GuardError, match=r"^\[T-06\] attn_sink"):
        module.flash_mla_with_kvcache(**call(), attn_sink=torch.zeros(3))


def test_formats_are_those_of_the_generation():
    for generation, layout in ((NEWER, "interleaved"), (OLDER, "page_split")):
        for format_id in (*generation.by_size.values(), *generation.by_name.values()):
            record = kv_format(format_id)
            assert format_id.startswith("v41") <= (record.layout.value == layout)
        for (d_qk, size), format_id in generation.by_size.items():
            record = kv_format(format_id)
            assert (record.d_qk, record.record_bytes) == (d_qk, size)
    assert NEWER.by_name.keys() == OLDER.by_name.keys()


def test_the_latest_kernels_that_fit_serve_a_call(served):
    _, first = served
    _, narrow = make(topk=32)
    _, base2 = make(lse={"base": 2})
    _, other = make("v32_h32")
    _, invariant = make(determinism="batch_invariant")
    for kernels in (narrow, base2, other, invariant):
        flash_mla.use(kernels)
    flash_mla.flash_mla_with_kvcache(**call())
    flash_mla.flash_mla_with_kvcache(**call(topk=16))
    flash_mla.flash_mla_with_kvcache(**call(heads=32))
    flash_mla.flash_mla_with_kvcache(**call(), enable_batch_invariant=True)
    counts = [len(kernels._plans._plans) for kernels in (first, narrow, base2, other, invariant)]
    assert counts == [1, 1, 0, 1, 1]
    _, latest = make()
    flash_mla.use(latest)
    flash_mla_legacy.flash_mla_with_kvcache(**call(topk=16))
    assert len(latest._plans._plans) == 1
    with pytest.raises(GuardError, match=r"^\[T-20\] use: kernels: expected loaded kernels"):
        flash_mla.use("v32_h64")


def test_without_given_kernels_a_deployment_is_derived(monkeypatch):
    DEPLOYMENTS.forget()
    with pytest.raises(GuardError, match=r"^\[T-20\] q: on cpu: expected a CUDA device"):
        flash_mla.flash_mla_with_kvcache(**call())
    loads = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(deployments, "load", lambda spec, device: (loads.append(spec), make()[1])[1])
    device = torch.device("cuda", 0)
    for _ in range(2):
        DEPLOYMENTS.find(Need(24, "v32", None, False), 100, 0, device)
    DEPLOYMENTS.find(Need(24, "v32", None, False), 2000, 0, device)
    DEPLOYMENTS.find(Need(24, "v32", None, True), 100, 0, device)
    assert [(spec.heads, spec.kv.format_id, spec.archs, spec.determinism) for spec in loads] == [
        (24, "v32", ("sm_90a",), "off"), (24, "v32", ("sm_90a",), "batch_invariant")]  # fmt: skip
    assert (loads[0].lse.base, loads[0].lse.empty, loads[0].topk) == ("e", "+inf", 1 << 20)
    extra = derived_spec(Need(64, "v41_page_split", "v41_fp4_page_split", False), "sm_90a")
    assert extra.extra_kv.format_id == "v41_fp4_page_split"


def test_a_captured_call_without_a_plan_has_one_of_its_own(served):
    driver, kernels = served
    direct = partial(kernels.sparse_decode, *(call()[name] for name in ("q", "k_cache", "indices")))
    driver.capturing = True
    with pytest.raises(FrozenError, match="not loaded on device 0 yet"):
        flash_mla.flash_mla_with_kvcache(**call(topk=2048))
    driver.capturing = False
    kernels.prepare()
    driver.capturing = True
    flash_mla.flash_mla_with_kvcache(**call(topk=2048))
    assert len(driver.launches) == 2 and not kernels._plans._plans
    with pytest.raises(FrozenError, match="call plan_sparse_decode before the capture"):
        direct()
    driver.capturing = False
    flash_mla.flash_mla_with_kvcache(**call(topk=2048))
    assert len(kernels._plans._plans) == 1
    driver.capturing = True
    flash_mla.flash_mla_with_kvcache(**call(topk=2048))
    assert len(kernels._plans._pinned) == 1


def test_the_modules_share_their_kernels():
    assert flash_mla.use == flash_mla_legacy.use
