"""Outputs full of poison, with a guard zone around every row that a kernel may write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# NaNs with payloads that arithmetic does not make.
_BF16_POISON, _FP32_POISON = 0x7FD5, 0x7FDEAD55
_GUARD_ELEMENTS = 128
_WORKSPACE_GUARD_BYTES = 512


@dataclass(frozen=True)
class GuardedTensor:
    """`view` is what the kernel gets; `whole` holds it and its guard zones, as integers."""

    view: Tensor
    whole: Tensor
    poison: int

    @classmethod
    def outputs(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strided: bool) -> GuardedTensor:
        """A poisoned output; `strided` gives every dim a gap, else it is contiguous between two zones."""
        integer, poison = (torch.int16, _BF16_POISON) if dtype is torch.bfloat16 else (torch.int32, _FP32_POISON)
        *outer, last = shape
        if strided:
            whole = torch.full((*(n + 1 for n in outer), last + _GUARD_ELEMENTS), poison, dtype=integer, device=device)
            # The part starts inside, so that both sides of every row are watched.
            inner = tuple(slice(1, n + 1) for n in outer)
            part = whole[(*inner, slice(_GUARD_ELEMENTS // 2, _GUARD_ELEMENTS // 2 + last))]
        else:
            count = torch.Size(shape).numel()
            whole = torch.full((count + 2 * _GUARD_ELEMENTS,), poison, dtype=integer, device=device)
            part = whole[_GUARD_ELEMENTS : _GUARD_ELEMENTS + count].view(shape)
        return cls(part.view(dtype), whole, poison)

    @classmethod
    def workspace(cls, size_bytes: int, device: torch.device) -> GuardedTensor:
        """A workspace full of 0xFF, which is NaN in fp32, at a multiple of the guard zones' size."""
        whole = torch.full((size_bytes + 3 * _WORKSPACE_GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=device)
        first = _WORKSPACE_GUARD_BYTES + -whole.data_ptr() % _WORKSPACE_GUARD_BYTES
        return cls(whole[first : first + size_bytes], whole, 0xFF)

    def poison_again(self) -> None:
        """Forget what was written, guard zones excepted."""
        integer = self.view.view(self.whole.dtype)
        integer.fill_(self.poison)

    def written_outside(self) -> int:
        """Elements outside the view that changed; the view is poisoned again on the way."""
        self.poison_again()
        if not self.view.is_contiguous():
            return int((self.whole != self.poison).sum())
        # Only the two zones: the largest outputs and workspaces would not fit a second time.
        start = self.view.view(self.whole.dtype).storage_offset()
        zones = (self.whole.view(-1)[:start], self.whole.view(-1)[start + self.view.numel() :])
        return sum(int((zone != self.poison).sum()) for zone in zones)


@dataclass(frozen=True)
class DecodeOutputs:
    """Poisoned out bf16 [b, s_q, h, d_v] and lse fp32 [b, h, s_q], the latter a view of [b, s_q, h]."""

    out: GuardedTensor
    lse_rows: GuardedTensor

    @classmethod
    def make(
        cls, batch: int, s_q: int, heads: int, d_v: int, device: torch.device, strided: bool = False
    ) -> DecodeOutputs:
        """Outputs of one call."""
        return cls(
            GuardedTensor.outputs((batch, s_q, heads, d_v), torch.bfloat16, device, strided),
            GuardedTensor.outputs((batch, s_q, heads), torch.float32, device, strided),
        )

    @property
    def lse(self) -> Tensor:
        """fp32 [b, h, s_q]."""
        return self.lse_rows.view.transpose(1, 2)

    def rows(self) -> tuple[Tensor, Tensor]:
        """(out [b * s_q, h, d_v], lse [b * s_q, h])."""
        return self.out.view.flatten(0, 1), self.lse_rows.view.flatten(0, 1)

    def bits(self) -> tuple[Tensor, Tensor]:
        """Copies of both as integers, for comparisons to the bit."""
        out, lse = (t.clone(memory_format=torch.contiguous_format) for t in (self.out.view, self.lse_rows.view))
        return out.view(torch.int16), lse.view(torch.int32)
