"""Benchmark data and the peer adapters, with stand-in libraries that compute the real result."""

import sys
import textwrap

import pytest
import torch

from dsagen.bench import data, peers
from dsagen.errors import SpecError
from dsagen.kv_format import kv_format

FLASH_MLA = """
import torch
from dsagen.bench.data import dequantise_rows
from dsagen.kv_format import kv_format

__version__ = "1.0.0"
seen = []

def attend(q, rows, ids, scale):
    keys = rows[ids.long()].float()
    scores = torch.einsum("nhd,nkd->nhk", q.float(), keys) * scale
    out = torch.einsum("nhk,nkd->nhd", scores.softmax(-1), keys[..., :512])
    return out.bfloat16(), scores.logsumexp(-1)

def get_mla_metadata():
    return object(), None

def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
                           softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, use_legacy=False):
    assert use_legacy and is_fp8_kvcache and not causal and head_dim_v == 512
    assert q.shape[2] in (64, 128) and k_cache.dtype == torch.float8_e4m3fn
    seen.append((q, tile_scheduler_metadata))
    rows = dequantise_rows(kv_format("v32"), k_cache.view(torch.uint8).reshape(-1, 656))
    out, lse = attend(q.flatten(0, 1), rows, indices.flatten(0, 1), softmax_scale)
    b, s, h, _ = q.shape
    return out.view(b, s, h, 512), lse.view(b, s, h).transpose(1, 2)
"""

FLASHINFER = """
import types
import torch
from flash_mla import attend

__version__ = "0.7.2.post1"
planned = []

class MLAPlanMetadata(types.SimpleNamespace):
    @classmethod
    def csr(cls, **fields):
        return cls(**fields)

class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, backend):
        assert backend == "fa3" and workspace.dtype == torch.uint8

    def plan(self, **fields):
        self.fields = types.SimpleNamespace(**fields)
        planned.append(self.fields)

    def run(self, query, kv_cache, return_lse, return_lse_base_on_e):
        assert return_lse and return_lse_base_on_e and all(part.is_contiguous() for part in (*query, *kv_cache))
        rows = torch.cat(kv_cache, -1).flatten(0, 1)
        ids = self.fields.metadata.kv_indices.view(query[0].shape[0], -1)
        return attend(torch.cat(query, -1), rows, ids, self.fields.sm_scale)

mla = types.SimpleNamespace(
    MLAPlanMetadata=MLAPlanMetadata, BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper
)
"""

MODULES = {"flash_mla": FLASH_MLA, "flashinfer": FLASHINFER}


@pytest.fixture(autouse=True)
def no_real_libraries(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("DSAGEN_PEER_SITE", raising=False)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def site(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("DSAGEN_PEER_SITE", str(tmp_path))
    return tmp_path


def case_of(**changes):
    fields = {"kv_format": "v32", "heads": 16, "batch": 3, "s_q": 2, "topk": 64, "kv_tokens": 256, "page_size": 64}
    return data.DecodeCase(**{**fields, **changes})


def inputs_of(case, sets=2, tokens=2048):
    pool = data.make_pool(case.kv_format, tokens, case.page_size, device="cpu", template_tokens=512)
    return data.decode_inputs(case, pool, sets)


def reference(item):
    keys = item.k_cache_bf16[item.indices.long()][:, :, :, 0].double()
    scores = torch.einsum("bshd,bskd->bshk", item.q.double(), keys) * item.sm_scale
    out = torch.einsum("bshk,bskd->bshd", scores.softmax(-1), keys[..., :512])
    return out, scores.logsumexp(-1).transpose(1, 2)


@pytest.mark.parametrize("heads", [1, 16, 64, 96, 128])
@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_each_callable_computes_its_own_input_set(site, peer, heads):
    case = case_of(heads=heads)
    inputs = inputs_of(case)
    assert peer.refuses(case) is None
    calls = peer.bind(case, inputs)
    assert len(calls) == len(inputs)
    for call, item in zip(calls, inputs, strict=True):
        out, lse = call()
        expected_out, expected_lse = reference(item)
        assert out.shape == (3, 2, heads, 512)
        assert out.dtype == torch.bfloat16
        assert (out.double() - expected_out).norm() < 4e-3 * expected_out.norm()
        assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


def test_flash_mla_pads_heads_before_timing_and_reuses_metadata(site):
    case = case_of(heads=16)
    calls = peers.SglFlashMla().bind(case, inputs_of(case))
    seen = sys.modules["flash_mla"].seen
    for call in (*calls, *calls):
        call()
    queries = [q for q, _ in seen]
    assert all(q.shape[2] == 64 and not q[:, :, 16:].any() for q in queries)
    assert queries[0] is queries[2]
    assert len({id(metadata) for _, metadata in seen}) == 1


def test_flashinfer_plans_one_request_per_query_token(site):
    case = case_of(kv_format="bf16", heads=8)
    inputs = inputs_of(case)
    peers.FlashInferFa3().bind(case, inputs)
    first, second = sys.modules["flashinfer"].planned
    assert first.page_size == 1
    assert (first.num_heads, first.head_dim_ckv, first.head_dim_kpe) == (8, 512, 64)
    assert first.metadata.qo_indptr.tolist() == list(range(7))
    assert first.metadata.kv_indptr.tolist() == [64 * n for n in range(7)]
    assert first.metadata.kv_len_arr.tolist() == [64] * 6
    assert torch.equal(first.metadata.kv_indices, inputs[0].indices.flatten())
    assert torch.equal(second.metadata.kv_indices, inputs[1].indices.flatten())


def test_labels_name_what_was_changed():
    flash_mla, fa3 = peers.peer("sgl-flash-mla"), peers.peer("flashinfer-fa3")
    assert flash_mla.label(case_of(heads=16)) == "sgl-flash-mla, heads padded to 64"
    assert flash_mla.label(case_of(heads=65)) == "sgl-flash-mla, heads padded to 128"
    assert flash_mla.label(case_of(heads=128)) == "sgl-flash-mla"
    assert fa3.label(case_of()) == "flashinfer-fa3, bf16 KV"
    assert fa3.label(case_of(kv_format="bf16")) == "flashinfer-fa3"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_format": "bf16"}, "FP8 caches only"),
        ({"topk": 100}, "multiple of 64, not 100"),
        ({"heads": 129}, "at most 128 heads, not 129"),
    ],
)
def test_flash_mla_refuses_with_a_reason(site, changes, reason):
    case = case_of(**changes)
    assert reason in peers.SglFlashMla().refuses(case)
    with pytest.raises(SpecError, match=reason):
        peers.SglFlashMla().bind(case, inputs_of(case))


def test_flashinfer_refuses_padding_missing_bf16_and_too_many_heads(site):
    fa3, case = peers.FlashInferFa3(), case_of()
    assert "at most 128 heads, not 160" in fa3.refuses(case_of(heads=160))
    inputs = inputs_of(case)
    inputs[1].indices[0, 0, 5] = -1
    with pytest.raises(SpecError, match="indices hold -1"):
        fa3.bind(case, inputs)
    pool = data.make_pool("v32", 2048, 64, device="cpu", template_tokens=512, with_bf16=False)
    with pytest.raises(SpecError, match="give the inputs k_cache_bf16"):
        fa3.bind(case, data.decode_inputs(case, pool, 1))


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_inputs_of_another_case_are_refused(site, peer):
    with pytest.raises(SpecError, match=r"q has shape \(3, 2, 16, 576\), the case needs \(3, 2, 32, 576\)"):
        peer.bind(case_of(heads=32), inputs_of(case_of()))
    with pytest.raises(SpecError, match=r"indices has shape"):
        peer.bind(case_of(topk=128), inputs_of(case_of()))
    with pytest.raises(SpecError, match="no input sets"):
        peer.bind(case_of(), [])


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_a_missing_library_says_what_to_install(monkeypatch, tmp_path, peer):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(SpecError, match=r"DSAGEN_PEER_SITE is not set.*pip install --target") as caught:
        _ = peer.version
    assert peer.requirement.split()[0] in str(caught.value)
    monkeypatch.setenv("DSAGEN_PEER_SITE", str(tmp_path))
    with pytest.raises(SpecError, match="DSAGEN_PEER_SITE is "):
        peer.bind(case_of(), inputs_of(case_of()))


def test_a_library_that_does_not_load_is_no_traceback(site):
    (site / "flash_mla" / "__init__.py").write_text("raise OSError('undefined symbol: aoti_torch_x')\n")
    with pytest.raises(SpecError, match="OSError: undefined symbol: aoti_torch_x"):
        _ = peers.SglFlashMla().version


def test_an_installed_copy_does_not_stand_in_for_the_named_one(site, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("installed")
    (other / "flash_mla").mkdir()
    (other / "flash_mla" / "__init__.py").write_text("__version__ = '0.9'\n")
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(SpecError, match="comes first on the import path"):
        _ = peers.SglFlashMla().version
    monkeypatch.delenv("DSAGEN_PEER_SITE")
    assert peers.SglFlashMla().version == "0.9"


def test_versions_and_names(site):
    assert [peer.version for peer in peers.PEERS] == ["1.0.0", "0.7.2.post1"]
    with pytest.raises(SpecError, match="did you mean flashinfer-fa3"):
        peers.peer("flashinfer")


def test_v32_pool_is_valid_and_matches_its_byte_map():
    pool = data.make_pool("v32", 640, 32, device="cpu", template_tokens=256)
    record = kv_format("v32")
    assert pool.k_cache.shape == (20, 32, 1, 656)
    raw = pool.k_cache.numpy().tobytes()
    codes = pool.k_cache[..., :512]
    assert not ((codes & 0x7F) == 0x7F).any()
    scales = pool.k_cache[..., 512:528].contiguous().view(torch.float32)
    assert ((scales >= 2.0**-5) & (scales <= 2.0**-2)).all()
    assert (torch.frexp(scales).mantissa != 0.5).float().mean() > 0.99
    for token, dim in ((0, 0), (37, 129), (255, 511), (256, 511), (600, 300), (639, 512), (639, 575)):
        page, offset = divmod(token, 32)
        value = record.dim_address(page, offset, dim, 32, 32 * 656)
        size = value.element.bits // 8
        number = value.element.decode(int.from_bytes(raw[value.byte : value.byte + size], "little"))
        group = record.scale_group(dim)
        if group is not None:
            at = record.scale_byte(page, offset, group, 32, 32 * 656)
            number *= float(torch.frombuffer(bytearray(raw[at : at + 4]), dtype=torch.float32)[0])
        assert pool.k_cache_bf16[token, 0, dim] == torch.tensor(number, dtype=torch.float32).bfloat16()
    assert torch.equal(pool.k_cache.view(640, -1)[:256], pool.k_cache.view(640, -1)[256:512])


def test_bf16_pool_is_one_tensor_in_two_shapes():
    pool = data.make_pool("bf16", 96, 16, device="cpu")
    assert pool.k_cache.shape == (6, 16, 1, 576)
    assert pool.k_cache_bf16.data_ptr() == pool.k_cache.data_ptr()
    assert pool.k_cache.abs().float().mean() > 0.1


def test_ids_are_distinct_and_sequences_have_regions_of_their_own():
    case = case_of(batch=4, topk=256)
    inputs = inputs_of(case, sets=2, tokens=2048)
    regions = []
    for item in inputs:
        assert item.indices.dtype == torch.int32
        for sequence in item.indices:
            for row in sequence:
                assert len(set(row.tolist())) == 256
            region = sequence // 256
            assert (region == region[0, 0]).all()
            regions.append(int(region[0, 0]))
            assert not torch.equal(sequence[0], sequence[1])
    assert regions == list(range(8))
    assert not torch.equal(inputs[0].q, inputs[1].q)


def test_regions_are_reused_when_the_pool_is_small_and_inputs_repeat_by_seed():
    case = case_of(batch=3)
    inputs = inputs_of(case, sets=4, tokens=512)
    assert all(int(item.indices.max()) < 512 for item in inputs)
    again = inputs_of(case, sets=4, tokens=512)
    assert torch.equal(inputs[2].indices, again[2].indices)
    assert torch.equal(inputs[2].q, again[2].q)


def test_scores_are_neither_flat_nor_one_hot():
    case = case_of(heads=32)
    item = inputs_of(case)[0]
    keys = item.k_cache_bf16[item.indices.long()][:, :, :, 0].float()
    scores = torch.einsum("bshd,bskd->bshk", item.q.float(), keys) * item.sm_scale
    assert 0.7 < scores.std() < 2.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "v5"}, "unknown KV format 'v5'"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"topk": 512}, "topk 512 > kv_tokens 256"),
    ],
)
def test_impossible_cases_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        case_of(**changes)


def test_pools_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="use 96 tokens"):
        data.make_pool("v32", 100, 32, device="cpu")
    pool = data.make_pool("v32", 96, 32, device="cpu")
    with pytest.raises(SpecError, match="kv_tokens 256 is more than the pool's 96"):
        data.decode_inputs(case_of(page_size=32), pool, 1)
    with pytest.raises(SpecError, match=r"pages of 32 tokens x 656 columns, the case needs 64 x 656"):
        data.decode_inputs(case_of(kv_tokens=96), pool, 1)


def test_case_counts_bytes_and_operations():
    case = case_of(heads=128, batch=128, s_q=1, topk=2048, kv_tokens=32768)
    assert case.kv_bytes == 128 * 2048 * 656
    assert case.flops == 2 * 128 * 128 * 2048 * 1088
    assert case.io_bytes == 128 * (128 * (576 * 2 + 512 * 2 + 4) + 2048 * 4)
