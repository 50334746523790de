"""Every tensor that does not fit ends in an error that names it, what was found, what is expected and what to do."""

import math

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins
from torch._subclasses.fake_tensor import FakeTensorMode

from dsagen.errors import GuardError
from dsagen.families.sparse_decode.guards import LAUNCH_GUARDS, POOL_GUARDS, SAME_PAGES_GUARD
from dsagen.runtime.api import Kernels
from dsagen.runtime.tensors import require_separate_elements
from dsagen.spec import load_spec

B, S, H, TOPK, PAGES, PAGE = 2, 3, 16, 100, 4, 16


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES"):
        monkeypatch.delenv(name, raising=False)


def kernels_of(spec="v32_h16"):
    driver = FakeDriver()
    return driver, Kernels(load_spec(spec), open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture
def kernels():
    return kernels_of()[1]


def tensors(**changes):
    return {
        "q": torch.zeros(B, S, H, 576, dtype=torch.bfloat16),
        "k_cache": torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8),
        "indices": torch.zeros(B, S, TOPK, dtype=torch.int32),
        **changes,
    }


def refusal(kernels, **changes):
    with pytest.raises(GuardError) as caught:
        kernels.sparse_decode(**tensors(**changes))
    return str(caught.value)


def pool(page_stride_bytes, row_stride_bytes=656, shift=0, pages=PAGES):
    raw = torch.zeros(pages * page_stride_bytes + PAGE * row_stride_bytes + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + shift
    return raw.as_strided((pages, PAGE, 1, 656), (page_stride_bytes, row_stride_bytes, 656, 1), start)


WRONG = [
    # dtype
    ("q", lambda t: t.half(), "[T-04] q: dtype float16, expected bfloat16"),
    ("k_cache", lambda t: t.to(torch.bfloat16), "[T-04] k_cache: dtype bfloat16, expected float8_e4m3fn or uint8"),
    ("indices", lambda t: t.long(), "[T-04] indices: dtype int64, expected int32"),
    ("indices", lambda t: t.float(), "[T-04] indices: dtype float32, expected int32"),
    ("topk_length", lambda t: torch.zeros(B, dtype=torch.int64), "[T-04] topk_length: dtype int64, expected int32"),
    ("attn_sink", lambda t: torch.zeros(H).bfloat16(), "[T-04] attn_sink: dtype bfloat16, expected float32"),
    ("out", lambda t: torch.zeros(B, S, H, 512), "[T-04] out: dtype float32, expected bfloat16"),
    ("lse", lambda t: torch.zeros(B, H, S).bfloat16(), "[T-04] lse: dtype bfloat16, expected float32"),
    # rank
    ("q", lambda t: t[:, 0], "[T-05] q: 3 dims (2, 16, 576), expected 4: [batch, s_q, heads, d_qk]"),
    ("k_cache", lambda t: t[:, :, 0], "[T-05] k_cache: 3 dims"),
    ("indices", lambda t: t[:, 0], "[T-05] indices: 2 dims (2, 100), expected 3: [batch, s_q, topk] = (2, 3, *)"),
    ("topk_length", lambda t: torch.zeros(B, S, 1, dtype=torch.int32), "[T-05] topk_length: 3 dims"),
    ("attn_sink", lambda t: torch.zeros(H, 1), "[T-05] attn_sink: 2 dims"),
    ("out", lambda t: torch.zeros(B, H, 512).bfloat16(), "[T-05] out: 3 dims"),
    ("lse", lambda t: torch.zeros(B, H), "[T-05] lse: 2 dims"),
    # shape, head count, format
    (
        "q",
        lambda t: t[..., :512],
        "[T-06] q: shape (2, 3, 16, 512), expected [batch, s_q, heads, d_qk] = (*, *, *, 576)",
    ),
    ("q", lambda t: t[:, :, :8], "[SD-07] q: 8 heads, the spec declares 16"),
    (
        "k_cache",
        lambda t: t[..., :528],
        "[T-06] k_cache: shape (4, 16, 1, 528), expected [pages, page_size, 1, columns of",
    ),
    (
        "k_cache",
        lambda t: t.expand(-1, -1, 2, -1),
        "[T-06] k_cache: 2 KV heads, expected 1: for sparse_decode declare kv_heads in",
    ),
    ("indices", lambda t: t[:1], "[T-06] indices: shape (1, 3, 100), expected [batch, s_q, topk] = (2, 3, *)"),
    ("indices", lambda t: t[:, :2], "[T-06] indices: shape (2, 2, 100)"),
    (
        "topk_length",
        lambda t: torch.zeros(B + 1, dtype=torch.int32),
        "[T-06] topk_length: shape (3,), expected [batch]",
    ),
    (
        "topk_length",
        lambda t: torch.zeros(B, 1, dtype=torch.int32),
        "[T-06] topk_length: shape (2, 1), expected [batch, s_q]",
    ),
    ("attn_sink", lambda t: torch.zeros(64), "[T-06] attn_sink: shape (64,), expected [heads] = (16,)"),
    ("out", lambda t: torch.zeros(B, S, H, 576).bfloat16(), "[T-06] out: shape (2, 3, 16, 576)"),
    ("lse", lambda t: torch.zeros(B, S, H), "[T-06] lse: shape (2, 3, 16), expected [batch, heads, s_q] = (2, 16, 3)"),
    # capacity
    (
        "indices",
        lambda t: torch.zeros(B, S, 2049, dtype=torch.int32),
        "[SD-06] indices: 2049 columns, the spec declares",
    ),
    ("indices", lambda t: t[..., :0], "[SD-06] indices: 0 columns, the spec declares topk 2048: pass 1..2048 columns"),
    # strides
    (
        "q",
        lambda t: torch.zeros(B, S, 576, H).bfloat16().transpose(2, 3),
        "[T-07] q: last dim has stride 16, expected 1",
    ),
    ("q", lambda t: torch.zeros(B, S, H, 580).bfloat16()[..., :576], "[SD-13] q: strides"),
    ("q", lambda t: torch.zeros(B, S, H, 584).bfloat16()[..., 4:580], "[SD-25] q: address"),
    ("indices", lambda t: torch.zeros(B, S, 200, dtype=torch.int32)[..., ::2], "[T-07] indices: last dim has stride 2"),
    ("k_cache", lambda t: torch.zeros(PAGES, PAGE, 1, 1312, dtype=torch.uint8)[..., ::2], "[T-07] k_cache: last dim"),
    ("k_cache", lambda t: pool(PAGE * 656 + 8), "[SD-11] k_cache: page stride"),
    ("k_cache", lambda t: pool(PAGE * 656, shift=8), "[SD-24] k_cache: base address"),
    ("k_cache", lambda t: pool(PAGE * 672, row_stride_bytes=672), "[SD-12] k_cache: token stride 672 B"),
    ("k_cache", lambda t: pool(PAGE * 656 - 656), "[SD-12] k_cache: token stride 656 B and page stride 9840 B"),
    ("k_cache", lambda t: t[:1].expand(4, -1, -1, -1), "[SD-12] k_cache: token stride 656 B and page stride 0 B"),
    ("k_cache", lambda t: t[:0], "[SD-10] k_cache: 0 pages of 16 tokens"),
    ("k_cache", lambda t: t[:, :0], "[SD-10] k_cache: 4 pages of 0 tokens"),
    ("attn_sink", lambda t: torch.zeros(2 * H)[::2], "[T-07] attn_sink: last dim has stride 2"),
    ("out", lambda t: torch.zeros(B, S, H, 513).bfloat16()[..., :512], "[SD-14] out: strides"),
    ("out", lambda t: torch.zeros(B, S, H, 514).bfloat16()[..., 1:513], "[SD-26] out: address"),
    (
        "out",
        lambda t: torch.zeros(B, S, 512, H).bfloat16().transpose(2, 3),
        "[T-07] out: last dim has stride 16, expected 1: pass out.contiguous(), or where it is written to, ",
    ),
    ("out", lambda t: torch.zeros(1, S, H, 512).bfloat16().expand(B, -1, -1, -1), "[T-08] out: strides (0, "),
    ("lse", lambda t: torch.zeros(B, 1, S).expand(-1, H, -1), "[T-08] lse: strides (3, 0, 1)"),
    # what is no plain tensor
    ("q", lambda t: t.float().numpy(), "[T-01] q: expected a torch.Tensor"),
    ("q", lambda t: None, "[T-01] q: expected a torch.Tensor, found NoneType"),
    ("k_cache", lambda t: None, "[T-01] k_cache: expected a torch.Tensor, found NoneType"),
    ("indices", lambda t: [[1]], "[T-01] indices: expected a torch.Tensor, found list"),
    ("q", lambda t: t.float().requires_grad_().bfloat16(), "[T-02] q: requires grad, and the op has no backward"),
    ("attn_sink", lambda t: torch.nn.Parameter(torch.zeros(H)), "[T-02] attn_sink: requires grad"),
    # devices
    ("q", lambda t: t.to("meta"), "[T-03] q: on meta, expected a CUDA device"),
    ("k_cache", lambda t: t.to("meta"), "[T-03] k_cache: on meta, q is on cpu: move it with k_cache.to('cpu')"),
    ("indices", lambda t: t.to("meta"), "[T-03] indices: on meta, q is on cpu"),
    ("topk_length", lambda t: torch.zeros(B, dtype=torch.int32, device="meta"), "[T-03] topk_length: on meta"),
    ("attn_sink", lambda t: torch.zeros(H, device="meta"), "[T-03] attn_sink: on meta"),
    ("out", lambda t: torch.zeros(B, S, H, 512, dtype=torch.bfloat16, device="meta"), "[T-03] out: on meta"),
    ("lse", lambda t: torch.zeros(B, H, S, device="meta"), "[T-03] lse: on meta"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[f"{n}-{m[:28]}" for n, _, m in WRONG])
def test_a_wrong_tensor_is_named(kernels, name, change, message):
    text = refusal(kernels, **{name: change(tensors().get(name))})
    assert message in text
    assert text.startswith("[")


def test_what_the_table_changes_is_all_that_is_wrong(kernels):
    kernels.sparse_decode(**tensors())
    kernels.sparse_decode(
        **tensors(
            k_cache=pool(PAGE * 656 + 16),
            topk_length=torch.zeros(B, dtype=torch.int32),
            attn_sink=torch.nn.Parameter(torch.zeros(H), requires_grad=False),
            out=torch.zeros(B, S, H, 512).bfloat16(),
            lse=torch.zeros(B, H, S),
        )
    )


def test_every_launch_guard_has_a_case():
    # SD-04 and SD-08 are tripped in test_op, SD-09 by the test below, SD-16 and SD-17 in
    # test_runtime_two_caches, SD-29 in test_choice_table.
    elsewhere = {"SD-04", "SD-08", "SD-09", "SD-16", "SD-17", "SD-29"}
    tripped = {message.split("]")[0].strip("[") for _, _, message in WRONG} | elsewhere
    assert {guard.guard_id for guard in (*LAUNCH_GUARDS, *POOL_GUARDS, SAME_PAGES_GUARD)} <= tripped


def test_a_pool_past_int32_ids_is_refused(kernels):
    pages = torch.zeros(1, PAGE, 1, 656, dtype=torch.uint8).expand(1 << 27, -1, -1, -1)
    assert refusal(kernels, k_cache=pages).startswith("[SD-09] k_cache: 2147483648 tokens cannot be addressed by int32")


def test_fake_tensors_are_refused(kernels):
    with FakeTensorMode():
        fake = torch.zeros(B, S, H, 576, dtype=torch.bfloat16)
    text = refusal(kernels, q=fake)
    assert text.startswith("[T-01] q: FakeTensor is a tensor subclass")


def test_subclasses_are_refused(kernels):
    class Wrapped(torch.Tensor):
        pass

    text = refusal(kernels, out=torch.zeros(B, S, H, 512).bfloat16().as_subclass(Wrapped))
    assert text.startswith("[T-01] out: Wrapped is a tensor subclass")


def test_a_tensor_that_passed_once_is_checked_again_when_it_differs(kernels):
    good = tensors()
    kernels.sparse_decode(**good)
    assert "[SD-25]" in refusal(kernels, q=torch.zeros(B, S, H, 584).bfloat16()[..., 4:580])
    assert "[T-02]" in refusal(kernels, q=good["q"].clone().requires_grad_())
    assert "[T-04]" in refusal(kernels, q=good["q"].half())


def test_outputs_must_not_share_memory_with_what_is_read(kernels):
    raw = torch.zeros(B * S * H * 1100).bfloat16()
    q = raw[: B * S * H * 576].view(B, S, H, 576)
    out = raw[B * S * H * 576 - 512 :][: B * S * H * 512].view(B, S, H, 512)
    assert refusal(kernels, q=q, out=out) == "[T-08] out: its memory overlaps that of q: pass an output of its own"
    sink = torch.zeros(B * H * S)
    assert "[T-08] lse: its memory overlaps that of attn_sink" in refusal(
        kernels, attn_sink=sink[:H], lse=sink.view(B, H, S)
    )
    kernels.sparse_decode(**tensors(q=q, out=raw[B * S * H * 576 :][: B * S * H * 512].view(B, S, H, 512)))


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (2, 1), True),
        ((4, 1), (1, 0), False),
        ((2, 2), (1, 1), True),
        ((3, 4, 5), (1, 15, 3), False),
        ((3, 4, 5), (1, 14, 3), True),
    ],
)
def test_shared_elements(shape, strides, shared):
    tensor = torch.zeros(200).as_strided(shape, strides)
    if shared:
        with pytest.raises(GuardError, match=r"\[T-08\] x: strides"):
            require_separate_elements("x", tensor)
    else:
        require_separate_elements("x", tensor)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, "0.1", True, torch.tensor(0.1)])
def test_a_bad_softmax_scale_is_refused(kernels, scale):
    assert refusal(kernels, softmax_scale=scale).startswith("[T-12] softmax_scale: ")


def test_bf16_rows_are_another_format():
    driver, kernels = kernels_of("v32_bf16_h128")
    q = torch.zeros(B, S, 128, 576).bfloat16()
    kernels.sparse_decode(q, torch.zeros(PAGES, PAGE, 1, 576).bfloat16(), torch.zeros(B, S, 64, dtype=torch.int32))
    assert driver.launches
    text = refusal(kernels, q=q)
    assert "[T-04] k_cache: dtype uint8, expected bfloat16" in text and "KV format bf16" in text


def checking_kernels(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    return kernels_of()


def test_checked_indices_name_the_first_bad_id(monkeypatch):
    _, kernels = checking_kernels(monkeypatch)
    indices = torch.randint(0, PAGES * PAGE, (B, S, TOPK), dtype=torch.int32)
    indices[1, 2, 70] = PAGES * PAGE
    indices[0, 0, 3] = -5
    text = refusal(kernels, indices=indices)
    assert text == (
        "[SD-22] indices[1, 2, 70] = 64: k_cache holds 64 tokens, so ids are below 64, or negative for padding (1 past "
        "it)"
    )
    per_request = torch.tensor([TOPK, 70], dtype=torch.int32)
    kernels.sparse_decode(**tensors(indices=indices, topk_length=per_request))
    per_token = torch.full((B, S), TOPK, dtype=torch.int32)
    per_token[1, 2] = 70
    kernels.sparse_decode(**tensors(indices=indices, topk_length=per_token))
    per_token[1, 2] = 71
    assert "[SD-22]" in refusal(kernels, indices=indices, topk_length=per_token)


@pytest.mark.parametrize(("length", "place"), [(TOPK + 1, "[0, 1]"), (-1, "[0, 1]")])
def test_checked_lengths_name_the_first_bad_one(monkeypatch, length, place):
    _, kernels = checking_kernels(monkeypatch)
    lengths = torch.zeros(B, S, dtype=torch.int32)
    lengths[0, 1] = length
    text = refusal(kernels, topk_length=lengths)
    assert text.startswith(
        f"[SD-21] topk_length{place} = {length}: the index rows have 100 columns, so lengths are 0..100"
    )


def test_checking_during_capture_is_an_error(monkeypatch):
    driver, kernels = checking_kernels(monkeypatch)
    plan = kernels.plan_sparse_decode(B, S, TOPK)
    driver.capturing = True
    assert "[T-13] DSAGEN_CHECK_INDICES" in refusal(kernels, plan=plan)
    assert driver.launches == []


def test_values_are_not_checked_unless_asked():
    driver, kernels = kernels_of()
    bad = torch.full((B, S, TOPK), 1 << 30, dtype=torch.int32)
    kernels.sparse_decode(**tensors(indices=bad, topk_length=torch.full((B,), 1 << 20, dtype=torch.int32)))
    assert driver.launches
