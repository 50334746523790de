"""What sparse decode writes: outputs as given or new, and how they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsagen.runtime.device_memory import new_output
from dsagen.runtime.tensors import free_strides

if TYPE_CHECKING:
    from dsagen.runtime.sparse_decode import DecodeTensors


def make_outputs(t: DecodeTensors, d_v: int) -> DecodeTensors:
    """The tensors with out and lse as given, or new: out bf16 [b, s_q, h, d_v], lse fp32 [b, h, s_q]."""
    batch, s_q, heads = t.q.shape[:3]
    out, lse = t.out, t.lse
    if out is None or lse is None:
        new_out, new_lse = new_outputs(batch, s_q, heads, d_v, t.q.device)
        out, lse = new_out if out is None else out, new_lse if lse is None else lse
    return t._replace(out=out, lse=lse)


def new_outputs(batch: int, s_q: int, heads: int, d_v: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """New out bf16 [b, s_q, h, d_v], and lse fp32 [b, h, s_q] as a view of [b, s_q, h]."""
    out = new_output("out", (batch, s_q, heads, d_v), torch.bfloat16, device)
    return out, new_output("lse", (batch, s_q, heads), torch.float32, device).transpose(1, 2)


def output_strides(t: DecodeTensors, batch: int, s_q: int, heads: int, d_v: int) -> dict[str, int]:
    """The arguments that say how outputs lie, those that are not given as `new_outputs` makes them."""
    # What is not given is made as `new_outputs` does.
    new = (
        ((batch, s_q * heads * d_v), (s_q, heads * d_v), (heads, d_v)),
        ((batch, s_q * heads), (heads, 1), (s_q, heads)),
    )
    new_out, new_lse = (tuple(stride if size > 1 else 0 for size, stride in dims) for dims in new)
    out = new_out if t.out is None else free_strides(t.out)
    lse = new_lse if t.lse is None else free_strides(t.lse)
    return {
        "out_stride_b": out[0],
        "out_stride_s": out[1],
        "out_stride_h": out[2],
        "lse_stride_b": lse[0],
        "lse_stride_h": lse[1],
        "lse_stride_s": lse[2],
    }
