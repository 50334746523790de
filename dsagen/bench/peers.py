"""Kernel libraries that sparse decode is compared with, behind one interface.

A peer runs the same inputs in the same process. Whatever an engine does once and not in every call (padding to more
heads, plans, scheduler metadata that all layers share) happens in `bind`, before any timing. The callables return what
the caller compares with the reference before it measures.

Peers are no dependency of dsagen. They are imported when first used, from the environment or from the folder that the
knob DSAGEN_PEER_SITE names, which is appended to the import path.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.bench.data import DecodeCase, DecodeInputs
from dsagen.bench.peer_import import import_peer
from dsagen.errors import SpecError

DecodeCall = Callable[[], tuple[Tensor, Tensor | None]]


class Peer(Protocol):
    """One library's way to run sparse decode."""

    @property
    def name(self) -> str:
        """Short name, as typed on the command line."""

    @property
    def version(self) -> str:
        """Version of the imported library; SpecError that says what to install when there is none."""

    def label(self, case: DecodeCase) -> str:
        """Name in tables, with what had to be changed to run the case (heads padded, another KV format)."""

    def refuses(self, case: DecodeCase) -> str | None:
        """Why the library cannot run the case even with the changes that `label` names; None when it can."""

    def bind(self, case: DecodeCase, inputs: Sequence[DecodeInputs]) -> list[DecodeCall]:
        """One callable for each input set; each returns out bf16 [b, s_q, heads, 512] and lse fp32 [b, heads, s_q].

        lse is to base e, or None. Raises SpecError for a missing library, a refused case and unusable inputs.
        """


class SglFlashMla:
    """sgl-flash-mla's SM90 kernels (`use_legacy=True`): FP8 records, 64 or 128 heads.

    It rounds V32's fp32 scales to bf16, so scales that are no powers of two cost it up to 2**-9 of relative error.
    """

    name = "sgl-flash-mla"
    requirement = "sgl-flash-mla==1.0.0"
    module = "flash_mla"

    # The only head counts with kernels, and the step of its top-k loop.
    HEAD_COUNTS = (64, 128)
    TOPK_STEP = 64

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def label(self, case: DecodeCase) -> str:
        """Says when heads are padded."""
        padded = self._padded_heads(case)
        return self.name if padded in (case.heads, None) else f"{self.name}, heads padded to {padded}"

    def refuses(self, case: DecodeCase) -> str | None:
        """Reads V32 only, up to 128 heads, top-k widths in whole blocks."""
        if case.kv_format != "v32":
            return f"{self.name} reads FP8 caches only, not {case.kv_format}"
        if self._padded_heads(case) is None:
            return f"{self.name} has kernels for at most {self.HEAD_COUNTS[-1]} heads, not {case.heads}"
        if case.topk % self.TOPK_STEP:
            return f"{self.name} needs a top-k that is a multiple of {self.TOPK_STEP}, not {case.topk}"
        return None

    def bind(self, case: DecodeCase, inputs: Sequence[DecodeInputs]) -> list[DecodeCall]:
        """Pads q with zero heads; the scheduler metadata is made by the first call and reused, as across layers."""
        _check_bindable(self, case, inputs)
        library = import_peer(self)
        metadata, _ = library.get_mla_metadata()
        heads, padded = case.heads, self._padded_heads(case) or case.heads

        # Its FP8 records are declared as e4m3 tensors, whatever else they hold.
        def decode(q: Tensor, k_cache: Tensor, item: DecodeInputs) -> tuple[Tensor, Tensor | None]:
            out, lse = library.flash_mla_with_kvcache(
                q=q,
                k_cache=k_cache,
                block_table=None,
                cache_seqlens=None,
                head_dim_v=case.record.d_v,
                tile_scheduler_metadata=metadata,
                softmax_scale=item.sm_scale,
                causal=False,
                is_fp8_kvcache=True,
                indices=item.indices,
                use_legacy=True,
            )
            return (out, lse) if heads == padded else (out[:, :, :heads], lse[:, :heads])

        return [
            functools.partial(decode, _pad_heads(item.q, padded), item.k_cache.view(torch.float8_e4m3fn), item)
            for item in inputs
        ]

    def _padded_heads(self, case: DecodeCase) -> int | None:
        return next((count for count in self.HEAD_COUNTS if case.heads <= count), None)


class FlashInferFa3:
    """flashinfer's fa3 MLA on a bf16 cache, used as sparse attention: pages of one token, selected ids as page list.

    Each query token is a request of its own. A V32 case reads the dequantised copy of the pool, 1.76 times the bytes.
    """

    name = "flashinfer-fa3"
    requirement = "flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2"
    module = "flashinfer"

    WORKSPACE_BYTES = 256 << 20

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def label(self, case: DecodeCase) -> str:
        """Says that the cache is bf16 where the case's is not."""
        return self.name if case.kv_format == "bf16" else f"{self.name}, bf16 KV"

    def refuses(self, case: DecodeCase) -> str | None:
        """Runs any head count up to 128 and any top-k."""
        if (case.record.d_qk, case.record.d_v) != (576, 512):
            return f"{self.name} is bound for 512 + 64 dims, not for those of {case.kv_format}"
        return f"{self.name} is bound for at most 128 heads, not {case.heads}" if case.heads > 128 else None

    def bind(self, case: DecodeCase, inputs: Sequence[DecodeInputs]) -> list[DecodeCall]:
        """Splits q and the cache into latent and rotary parts and plans every input set."""
        _check_bindable(self, case, inputs)
        mla = import_peer(self).mla
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=inputs[0].q.device)
        caches: dict[int, tuple[Tensor, Tensor]] = {}
        calls: list[DecodeCall] = []
        for item in inputs:
            if item.k_cache_bf16 is None:
                raise SpecError(
                    f"{self.name} reads a bf16 cache: give the inputs k_cache_bf16 (make_pool(with_bf16=True))"
                )
            _check_all_selected(self, item.indices)
            key = item.k_cache_bf16.data_ptr()
            if key not in caches:
                caches[key] = _split_parts(item.k_cache_bf16, case)
            wrapper = self._plan(mla, workspace, case, item)
            calls.append(
                functools.partial(_run_flashinfer, wrapper, _split_parts(item.q.flatten(0, 1), case), caches[key], case)
            )
        return calls

    def _plan(self, mla: Any, workspace: Tensor, case: DecodeCase, item: DecodeInputs) -> Any:
        offsets = torch.arange(case.queries + 1, dtype=torch.int32)
        wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(
                qo_indptr=offsets,
                kv_indptr=offsets * case.topk,
                kv_indices=item.indices.flatten(),
                kv_len_arr=torch.full((case.queries,), case.topk, dtype=torch.int32),
            ),
            num_heads=case.heads,
            head_dim_ckv=case.record.d_v,
            head_dim_kpe=case.record.d_rope,
            page_size=1,
            causal=False,
            sm_scale=item.sm_scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="basee",
        )
        return wrapper


def _run_flashinfer(
    wrapper: Any, query: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], case: DecodeCase
) -> tuple[Tensor, Tensor | None]:
    out, lse = wrapper.run(query=query, kv_cache=cache, return_lse=True, return_lse_base_on_e=True)
    shape = (case.batch, case.s_q, case.heads)
    return out.view(*shape, -1), lse.view(shape).transpose(1, 2)


PEERS: tuple[Peer, ...] = (SglFlashMla(), FlashInferFa3())


def peer(name: str) -> Peer:
    """The peer of that name; SpecError with the known ones otherwise."""
    names = [known.name for known in PEERS]
    for known in PEERS:
        if known.name == name:
            return known
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise SpecError(f"unknown peer {name!r}{hint}: known are {', '.join(names)}")


def _check_bindable(library: Peer, case: DecodeCase, inputs: Sequence[DecodeInputs]) -> None:
    reason = library.refuses(case)
    if reason is not None:
        raise SpecError(reason)
    if not inputs:
        raise SpecError(f"{library.name}: no input sets given; at least one is needed")
    wanted_q = (case.batch, case.s_q, case.heads, case.record.d_qk)
    wanted_ids = (case.batch, case.s_q, case.topk)
    for item in inputs:
        for name, tensor, wanted in (("q", item.q, wanted_q), ("indices", item.indices, wanted_ids)):
            if tuple(tensor.shape) != wanted:
                raise SpecError(f"{library.name}: {name} has shape {tuple(tensor.shape)}, the case needs {wanted}")


def _check_all_selected(library: Peer, indices: Tensor) -> None:
    """A page list has no padding, so -1 would be read as an address."""
    lowest = int(indices.min())
    if lowest < 0:
        raise SpecError(f"{library.name} cannot skip padding, and indices hold {lowest}: use ids >= 0 only")


def _pad_heads(q: Tensor, heads: int) -> Tensor:
    if q.shape[2] == heads:
        return q
    padded = q.new_zeros(q.shape[0], q.shape[1], heads, q.shape[3])
    padded[:, :, : q.shape[2]] = q
    return padded


def _split_parts(rows: Tensor, case: DecodeCase) -> tuple[Tensor, Tensor]:
    """Contiguous copies of the latent and the rotary columns of [..., d_qk]."""
    width = case.record.d_v
    return rows[..., :width].contiguous(), rows[..., width:].contiguous()
