"""Sparse decode as flash_mla calls it, in terms of the op: shared by the modules of both generations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from dsagen.compat.deployments import Deployments, Need
from dsagen.compat.metadata import CallShape, FlashMLASchedMeta, KnownCall
from dsagen.errors import GuardError, SpecError
from dsagen.guard import require_bool, require_int
from dsagen.runtime.api import Kernels
from dsagen.runtime.sparse_decode import DecodeTensors

FUNCTION = "flash_mla_with_kvcache"
HEAD_DIM_V = 512
# One for the process: an engine may import both generations.
DEPLOYMENTS = Deployments()


@dataclass(frozen=True)
class Generation:
    """How a generation of flash_mla reads caches: format ids by (d_qk, bytes of a token), and by its names of them."""

    name: str
    by_size: Mapping[tuple[int, int], str]
    by_name: Mapping[str, str]


NEWER = Generation(
    "the newer flash_mla, whose V4.1 caches are interleaved",
    {(576, 656): "v32", (512, 584): "v4", (512, 528): "v41_interleaved", (512, 288): "v41_fp4_interleaved"},
    {"V32": "v32", "V32_NO_ROPE": "v32_nope", "V4": "v4", "V41": "v41_interleaved", "V41_FP4": "v41_fp4_interleaved"},
)
OLDER = Generation(
    "the older flash_mla, whose V4.1 caches are split by page",
    {(576, 656): "v32", (512, 584): "v4", (512, 528): "v41_page_split", (512, 288): "v41_fp4_page_split"},
    {"V32": "v32", "V32_NO_ROPE": "v32_nope", "V4": "v4", "V41": "v41_page_split", "V41_FP4": "v41_fp4_page_split"},
)


class DecodeCall(NamedTuple):
    """The arguments of a call by flash_mla's names."""

    q: Tensor
    k_cache: Tensor
    head_dim_v: int
    tile_scheduler_metadata: object
    num_splits: object
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    indices: Tensor | None
    attn_sink: Tensor | None
    extra_k_cache: Tensor | None
    extra_indices_in_kvcache: Tensor | None
    topk_length: Tensor | None
    extra_topk_length: Tensor | None
    enable_batch_invariant: bool = False
    kv_format: str | None = None
    out: Tensor | None = None


def repeated(
    meta: object,
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor | None,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    scalars: tuple[object, ...],
) -> tuple[Tensor, Tensor] | None:
    """The results of a call that is like the last checked one of its metadata; None where it has to be checked.

    `scalars` are all of its arguments that are no tensors. What tensors are is looked at by the launcher in C, but for
    their shapes, by which a metadata object refuses calls.
    """
    known = meta.known if type(meta) is FlashMLASchedMeta else None
    if known is None or known.version != DEPLOYMENTS.version or torch.compiler.is_compiling():
        return None
    if known.like != _like(q, k_cache, indices, extra_k_cache, extra_indices, scalars):
        return None
    tensors = q, k_cache, indices, topk_length, attn_sink, out, None, None, extra_k_cache, extra_indices
    found = known.repeat(*tensors, extra_topk_length, None, None, None, known.softmax_scale, None)
    return None if found is False else found


def _like(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    scalars: tuple[object, ...],
) -> tuple[object, ...] | None:
    """What two calls that are alike have in common, beside what the launcher tells; None for what is no call."""
    try:
        first = q.shape, k_cache.shape, indices.shape  # type: ignore[union-attr]
        if extra_k_cache is None and extra_indices is None:
            return *first, None, None, scalars
        return *first, extra_k_cache.shape, extra_indices.shape, scalars  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # what is no tensor, and a nested one
        return None


def decode(call: DecodeCall, generation: Generation, scalars: tuple[object, ...]) -> tuple[Tensor, Tensor]:
    """(out [b, s_q, h_q, 512] bf16, lse [b, h_q, s_q] fp32, natural); GuardError for what cannot be honoured.

    `scalars` are as `repeated` takes them for a call like this one.
    """
    indices = _require_sparse(call)
    meta = _require_metadata(call)
    for name, tensor, dims in (("q", call.q, 4), ("k_cache", call.k_cache, 4), ("indices", indices, 3)):
        _require_dims(name, tensor, dims)
    has_extra = call.extra_k_cache is not None
    if has_extra != (call.extra_indices_in_kvcache is not None):
        refuse("extra_indices_in_kvcache", "it and extra_k_cache come together: pass both or neither")
    if call.extra_topk_length is not None and not has_extra:
        refuse("extra_topk_length", "there is no extra_k_cache that it could be of: pass both or neither")
    if has_extra:
        _require_dims("extra_k_cache", call.extra_k_cache, 4)
        _require_dims("extra_indices_in_kvcache", call.extra_indices_in_kvcache, 3)
    shape = _shape_of(call, indices)
    meta.require(shape, FUNCTION)
    # Before the kernels are looked up: whoever gives others meanwhile makes it another one.
    version = DEPLOYMENTS.version
    kernels = _kernels(call, indices, shape, generation)
    # The op refuses a q without dims.
    scale = (call.q.shape[3] or 1) ** -0.5 if call.softmax_scale is None else call.softmax_scale
    result = _run(call, indices, kernels, scale)
    meta.fill(shape)
    repeat = kernels.decode_repeater
    if repeat is not None and not torch.compiler.is_compiling():
        like = _like(call.q, call.k_cache, indices, call.extra_k_cache, call.extra_indices_in_kvcache, scalars)
        meta.known = None if like is None else KnownCall(like, version, repeat, scale)
    return result


def refuse(argument: str, text: str, function: str = FUNCTION) -> NoReturn:
    """GuardError that names the argument."""
    raise GuardError(f"[T-20] {function}: {argument}: {text}")


def _require_sparse(call: DecodeCall) -> Tensor:
    if call.indices is None:
        refuse("indices", "None asks for dense decode, which is not built: pass the selected tokens")
    if require_bool("causal", call.causal):
        refuse("causal", "True means nothing beside indices: they say what a token sees; pass False")
    if not require_bool("is_fp8_kvcache", call.is_fp8_kvcache):
        refuse("is_fp8_kvcache", "False: sparse decode of flash_mla reads FP8 caches; for bf16 use dsagen.load")
    if require_int("head_dim_v", call.head_dim_v) != HEAD_DIM_V:
        refuse("head_dim_v", f"{call.head_dim_v!r}: rows have {HEAD_DIM_V} dims of value: pass {HEAD_DIM_V}")
    return call.indices


def _require_metadata(call: DecodeCall) -> FlashMLASchedMeta:
    meta = call.tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        refuse(
            "tile_scheduler_metadata",
            f"{type(meta).__name__}: expected what get_mla_metadata() returns first; tensors of the generation of 2025 "
            "are not read",
        )
    if call.num_splits is not None:
        refuse("num_splits", "expected None, which get_mla_metadata() returns second: plans decide splits")
    return meta


def require_strided(function: str, name: str, tensor: Tensor) -> None:
    """GuardError for a tensor that has no shape or strides to ask for."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        refuse(name, f"a tensor of layout {layout}: pass a plain strided one", function)


def _require_dims(name: str, tensor: object, dims: int) -> None:
    if not isinstance(tensor, Tensor):
        refuse(name, f"expected a torch.Tensor, found {type(tensor).__name__}")
    require_strided(FUNCTION, name, tensor)
    if tensor.dim() != dims:
        refuse(name, f"{tensor.dim()} dims {tuple(tensor.shape)}, expected {dims}")


def _shape_of(call: DecodeCall, indices: Tensor) -> CallShape:
    extra, extra_ids = call.extra_k_cache, call.extra_indices_in_kvcache
    # A tensor's shape is made anew each time that it is asked for.
    b, s_q, h_q, _ = call.q.shape
    _, page_block_size, h_k, _ = call.k_cache.shape
    return CallShape(
        b=b,
        s_q=s_q,
        h_q=h_q,
        page_block_size=page_block_size,
        h_k=h_k,
        causal=call.causal,
        is_fp8_kvcache=call.is_fp8_kvcache,
        topk=indices.shape[2],
        extra_page_block_size=None if extra is None else extra.shape[1],
        extra_topk=None if extra_ids is None else extra_ids.shape[2],
        enable_batch_invariant=call.enable_batch_invariant,
    )


def _kernels(call: DecodeCall, indices: Tensor, shape: CallShape, generation: Generation) -> Kernels:
    d_qk = call.q.shape[3]
    kv = _format_of("k_cache", call.k_cache, d_qk, call.kv_format, generation)
    extra = None
    if call.extra_k_cache is not None:
        # A name is that of the main cache; a second one of another size has its own format.
        same = call.extra_k_cache.shape[3] == call.k_cache.shape[3]
        extra = kv if same else _format_of("extra_k_cache", call.extra_k_cache, d_qk, None, generation)
    need = Need(shape.h_q, kv, extra, call.enable_batch_invariant)
    try:
        return DEPLOYMENTS.find(need, indices.shape[2], shape.extra_topk or 0, call.q.device)
    except SpecError as error:
        argument = "extra_k_cache" if "extra_kv" in str(error) else "q, k_cache"
        refuse(argument, f"no kernels for {need.heads} heads over {kv}: {' '.join(str(error).split())}")


def _run(call: DecodeCall, indices: Tensor, kernels: Kernels, scale: float) -> tuple[Tensor, Tensor]:
    second = (call.extra_k_cache, call.extra_indices_in_kvcache, call.extra_topk_length)
    first = (call.q, call.k_cache, indices, call.topk_length, call.attn_sink, call.out, None)
    tensors = DecodeTensors(*first, None, *second)
    if torch.compiler.is_compiling():
        q, k_cache, indices, *_ = tensors
        named = {name: getattr(tensors, name) for name in DecodeTensors._fields[3:]}
        return kernels.sparse_decode(q, k_cache, indices, **named, softmax_scale=scale)
    return kernels.decode_with_shared_plan(tensors, scale, may_plan_in_capture=True)


def _format_of(name: str, cache: Tensor, d_qk: int, kv_format: str | None, generation: Generation) -> str:
    size = cache.shape[3] * cache.element_size()
    if kv_format is not None:
        if not isinstance(kv_format, str) or kv_format not in generation.by_name:
            refuse("kv_format", f"{kv_format!r:.200}: expected one of {', '.join(generation.by_name)}")
        return generation.by_name[kv_format]
    if (d_qk, size) not in generation.by_size:
        known = ", ".join(f"{d}-dim q with {b} B" for d, b in generation.by_size)
        refuse(name, f"{size} B a token beside a q of {d_qk} dims: {generation.name} knows {known}")
    return generation.by_size[d_qk, size]
