"""The drop-in modules behind the interface that conformance cases are run by."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from dsagen.spec import DeploymentSpec


class DropIn:
    """Loaded kernels as a caller of flash_mla reaches them; outputs are copied to where a case wants them."""

    def __init__(self, module: ModuleType, spec: DeploymentSpec, **options: Any) -> None:
        self.module, self.spec, self.options = module, spec, options

    def prepare(self) -> None:
        """Nothing: a drop-in has nothing of the kind."""

    def sparse_decode_workspace_bytes(self, *_: int, **__: Any) -> int:
        return 0

    def plan_sparse_decode(self, *_: int, **__: Any) -> Any:
        return self.module.get_mla_metadata()[0]

    def sparse_decode(
        self, q: Tensor, k_cache: Tensor, indices: Tensor, *, plan: Any, softmax_scale: float, out: Tensor, lse: Tensor,
        extra_indices: Tensor | None = None, **rest: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        named = {name: tensor for name, tensor in rest.items() if tensor is not None}
        if extra_indices is not None:
            named["extra_indices_in_kvcache"] = extra_indices
        result = self.module.flash_mla_with_kvcache(
            q, k_cache, None, None, 512, plan, softmax_scale=softmax_scale, is_fp8_kvcache=True, indices=indices,
            **named, **self.options,
        )  # fmt: skip
        assert result[1].shape == (q.shape[0], q.shape[2], q.shape[1])
        assert result[1].transpose(1, 2).is_contiguous() and result[0].is_contiguous()
        out.copy_(result[0])
        lse.copy_(result[1])
        return out, lse
