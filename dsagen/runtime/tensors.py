"""What an op asks of its tensors. Every refusal names the tensor, what was found, what is expected and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from dsagen.errors import GuardError
from dsagen.runtime.driver import Driver

_EXACT_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class TensorRule:
    """Expected dtypes (torch names) and shape of a tensor; `layout` describes the dims for messages.

    A dim of None is any size. `last_dim_contiguous` asks for stride 1 in the last dim.
    """

    name: str
    dtypes: tuple[str, ...]
    layout: str
    shape: tuple[int | None, ...]
    last_dim_contiguous: bool = True


def require_plain(name: str, tensor: object) -> None:
    """Refuse what is no plain torch tensor: other types, tensor subclasses, FakeTensors, tensors that require grad."""
    if type(tensor) not in _EXACT_TYPES:
        if not isinstance(tensor, torch.Tensor):
            raise GuardError(f"[T-01] {name}: expected a torch.Tensor, found {type(tensor).__name__}")
        raise GuardError(
            f"[T-01] {name}: {type(tensor).__name__} is a tensor subclass, whose memory may not be what its shape "
            "says: pass a plain torch.Tensor"
        )
    assert isinstance(tensor, torch.Tensor)
    require_no_grad(name, tensor)


def require_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that requires grad or has a tangent, traced or not."""
    if tensor.requires_grad:
        raise GuardError(
            f"[T-02] {name}: requires grad, and the op has no backward: call it under torch.no_grad() with "
            f"{name}.detach()"
        )
    # Only inside of a level of forward-mode AD are there tangents, and elsewhere asking for them would cost each call.
    if getattr(forward_ad, "_current_level", -1) >= 0 and _tangent(tensor) is not None:
        raise GuardError(
            f"[T-02] {name}: has a forward-mode tangent, which the op does not carry on: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def _tangent(tensor: torch.Tensor) -> Any:
    return forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose address and strides do not lead to its values."""
    if tensor.is_nested:
        found = "is a nested tensor"
    elif tensor.layout is not torch.strided:
        found = f"has the layout {str(tensor.layout).removeprefix('torch.')}"
    elif not _has_address(tensor):
        found = "has no memory of its own (inside torch.vmap, torch.func or a mode of torch, or its storage was freed)"
    elif tensor.is_neg():
        found = "is negated lazily (tensor.is_neg())"
    else:
        return
    raise GuardError(
        f"[T-14] {name}: {found}: pass a plain strided tensor that holds its values, outside of torch's transforms"
    )


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # what torch says of a tensor without storage
        return False


def require_served(name: str, tensor: torch.Tensor, driver: Driver) -> None:
    """Refuse a tensor on a device of a kind that the driver does not serve."""
    if driver.ordinal(tensor.device) is None:
        raise GuardError(f"[T-03] {name}: on {tensor.device}, expected {driver.wanted_home(name, tensor.device)}")


def require_device(name: str, tensor: torch.Tensor, expected: torch.device, expected_from: str) -> None:
    """Refuse a tensor on another device."""
    if tensor.device != expected:
        raise GuardError(
            f"[T-03] {name}: on {tensor.device}, {expected_from} is on {expected}: move it with "
            f"{name}.to({str(expected)!r})"
        )


def require(rule: TensorRule, tensor: torch.Tensor) -> None:
    """Refuse a tensor of another dtype, rank, shape or innermost stride."""
    dtype = dtype_name(tensor)
    if dtype not in rule.dtypes:
        raise GuardError(
            f"[T-04] {rule.name}: dtype {dtype}, expected {' or '.join(rule.dtypes)} for {rule.layout}: pass it as such"
        )
    shape = tuple(tensor.shape)
    if len(shape) != len(rule.shape):
        raise GuardError(
            f"[T-05] {rule.name}: {len(shape)} dims {shape}, expected {len(rule.shape)}: {expected_shape(rule)}"
        )
    if any(want is not None and want != got for want, got in zip(rule.shape, shape, strict=True)):
        raise GuardError(f"[T-06] {rule.name}: shape {shape}, expected {expected_shape(rule)}")
    if rule.last_dim_contiguous and shape and shape[-1] > 1 and tensor.stride(-1) != 1:
        raise GuardError(
            f"[T-07] {rule.name}: last dim has stride {tensor.stride(-1)}, expected 1: pass {rule.name}.contiguous(), "
            "or where it is written to, which would fill that copy, allocate it so"
        )


def require_kv_heads(name: str, cache: torch.Tensor, kv_heads: int) -> None:
    """Refuse a cache [pages, page_size, KV heads, columns] with another number of KV heads."""
    if cache.dim() == 4 and cache.shape[2] != kv_heads and cache.shape[2] > 0:
        raise GuardError(
            f"[T-06] {name}: {cache.shape[2]} KV heads, expected {kv_heads}: for sparse_decode declare kv_heads in the "
            "spec; other ops take a row for each KV head: pass [pages, page_size * KV heads, 1, columns], a slot for "
            "each row"
        )


def expected_shape(rule: TensorRule) -> str:
    """The shape that a rule asks for, such as `[batch, s_q, heads, d_qk] = (*, *, 16, 576)`."""
    sizes = ", ".join("*" if size is None else str(size) for size in rule.shape)
    return f"{rule.layout} = ({sizes}{',' if len(rule.shape) == 1 else ''})"


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of a dtype, without its prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def free_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements, 0 for dims of size 1: their stride never moves anything, and torch lets it be any number."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_separate_elements(name: str, tensor: torch.Tensor) -> None:
    """Refuse an output whose elements share memory, such as an expanded tensor."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size <= 1:
            continue
        if stride < reach:
            raise GuardError(
                f"[T-08] {name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} let elements share memory: "
                "pass an output in which each element has its own"
            )
        reach = stride * (size - 1) + reach


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of the last one that its strides reach."""
    if tensor.numel() == 0:
        return 0
    steps = sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def require_no_overlap(
    outputs: Collection[str], tensors: Sequence[tuple[str, torch.Tensor]], spans: Mapping[str, int]
) -> None:
    """Refuse an output whose memory range meets another tensor's: a CTA writes it while others still read.

    `outputs` names those of `tensors` that are written, `spans` gives each tensor's `span_bytes` by name.
    """
    ranges = [(name, first := tensor.data_ptr(), first + spans[name]) for name, tensor in tensors]
    for name, first, last in ranges:
        if name not in outputs:
            continue
        for other, other_first, other_last in ranges:
            if first < other_last and other_first < last and other != name:
                raise GuardError(f"[T-08] {name}: its memory overlaps that of {other}: pass {_separate(name)}")


def _separate(name: str) -> str:
    return "one that serves nothing else" if name == "workspace" else "an output of its own"


def signature(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """All that the checks of a plain tensor read, except memory ranges: equal signatures pass or fail alike.

    RuntimeError for a tensor without strides or storage.
    """
    if tensor is None:
        return None
    address = tensor.data_ptr()
    alignment = address & 15 if address else None
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), alignment, tensor.is_neg())
