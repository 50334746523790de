"""Top-k as engines call it, in terms of the op: what the modules of sgl_kernel and flashinfer share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsagen.compat.decode import refuse, require_strided
from dsagen.compat.deployments import SelectionNeed, Selections
from dsagen.errors import GuardError
from dsagen.guard import rename
from dsagen.runtime.tensors import require_memory, require_plain

# One for the process: an engine may import both libraries.
SELECTIONS = Selections()
_SCORES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def select(function: str, scores: Tensor, k: int, names: Mapping[str, str], **options: Any) -> Tensor:
    """Kernels.topk for a call of `function`; `names` are the peer's for the op's arguments, for errors.

    GuardError for what does not fit.
    """
    name = names["scores"]
    require_tensor(function, name, scores)
    if scores.dtype not in _SCORES:
        allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in _SCORES)
        refuse(name, f"dtype {str(scores.dtype).removeprefix('torch.')}: scores are {allowed}", function)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        refuse(names["k"], f"{k!r}: expected how many to select, 1 at least", function)
    kernels = SELECTIONS.kernels_for(SelectionNeed(_SCORES[scores.dtype], k), scores.device, name)
    try:
        return kernels.topk(scores, k=k, **options)
    except GuardError as error:
        raise rename(error, names) from None


def require_readable(function: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """GuardError for what torch is to compute with before an op sees it: without values, or with values elsewhere."""
    if not torch.compiler.is_compiling():
        require_plain(name, tensor)
        require_memory(name, tensor)
    if tensor.device != device:
        refuse(name, f"on {tensor.device}, others are on {device}: move it with {name}.to({str(device)!r})", function)


def require_int32(function: str, name: str, tensor: Tensor) -> None:
    """GuardError for a tensor of another dtype."""
    if tensor.dtype is not torch.int32:
        found = str(tensor.dtype).removeprefix("torch.")
        refuse(name, f"dtype {found}, expected int32: pass {name}.int()", function)


def require_tensor(function: str, name: str, tensor: object, dims: int | None = None, rows: int | None = None) -> None:
    """GuardError for what is no strided tensor, or not of so many dims, or not of so many rows."""
    if not isinstance(tensor, Tensor):
        refuse(name, f"expected a torch.Tensor, found {type(tensor).__name__}", function)
    require_strided(function, name, tensor)
    if dims is not None and tensor.dim() != dims:
        refuse(name, f"{tensor.dim()} dims {tuple(tensor.shape)}, expected {dims}", function)
    if rows is not None and tensor.shape[0] != rows:
        refuse(name, f"{tensor.shape[0]} rows, expected {rows}", function)
