"""The index cache's ops on the emulator: pools full of poison, kernels as the build compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from decode import Kernel
from ptx_texts import ptx_of

from dsagen.arch import arch as arch_row
from dsagen.check.cache_inputs import whole
from dsagen.check.index_run import IndexCacheRun
from dsagen.check.probes import WrongResultError
from dsagen.division import page_divisor
from dsagen.emulator import Memory
from dsagen.families.index_cache.family import FAMILY
from dsagen.families.index_cache.op import blocks_for
from dsagen.plan import Variant
from dsagen.spec import DeploymentSpec, load_spec


def spec_of(
    keys: str, dim: int = 128, rule: str | None = None, rows: str = "bf16", arch: str = "sm_90a"
) -> DeploymentSpec:
    write = {"rows": rows} if rule is None else {"rows": rows, "rule": rule}
    index = {"heads": 8, "dim": dim, "keys": keys}
    return load_spec(
        {"model": "v32", "heads": 16, "archs": [arch], "ops": ["index_cache"], "index": index, "index_write": write}
    )


@cache
def compiled(variant: Variant) -> Kernel:
    plan = FAMILY.plan(variant)
    return Kernel(plan, ptx_of(plan))


def kernels_of(spec: DeploymentSpec) -> dict[str, Kernel]:
    cells = FAMILY.expand(spec, arch_row(spec.archs[0]))
    return {cell.role: compiled(cell.variant) for cell in cells if cell.variant is not None}


@dataclass
class EmulatedIndexCache:
    """A spec's ops with the runtime's signatures, for the cases of the check; `far` puts pages so many bytes apart."""

    spec: DeploymentSpec
    kernels: dict[str, Kernel]
    seed: int = 0
    schedule: str | None = None
    far: int | None = None

    @classmethod
    def of(cls, spec: DeploymentSpec, **options: Any) -> EmulatedIndexCache:
        return cls(spec, kernels_of(spec), **options)

    def prepare(self) -> None:
        pass

    def index_write(self, keys: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor) -> None:
        memory = Memory()
        arguments = {
            "keys": placed("keys", keys, memory, writable=False), "key_stride": keys.stride(0),
            "slots": memory.add("slots", slots, writable=False), "slots_wide": int(slots.dtype is torch.int64),
            "rows_count": len(slots), **self._pool(k_cache, memory, writable=True),
        }  # fmt: skip
        self._launch("write", len(slots), arguments, memory)

    def index_gather(
        self,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        row_starts: torch.Tensor,
        rows: int,
        *,
        token_starts: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory = Memory()
        lists = {"block_table": block_table, "row_starts": row_starts, "token_starts": token_starts}
        arguments = {
            **{name: 0 if t is None else memory.add(name, t, writable=False) for name, t in lists.items()},
            "codes": placed("codes", codes, memory), "code_stride_bytes": codes.stride(0),
            "scales": placed("scales", scales, memory), "scale_stride_bytes": 4 * scales.stride(0),
            "rows_count": rows, "table_stride": block_table.stride(0), "table_columns": block_table.shape[1],
            "requests": len(block_table), **self._pool(k_cache, memory, writable=False),
        }  # fmt: skip
        self._launch("gather", rows, arguments, memory)
        return codes, scales

    def _pool(self, cache: torch.Tensor, memory: Memory, writable: bool) -> dict[str, int]:
        pages, page_size = cache.shape[:2]
        multiplier, shift = page_divisor(page_size)
        stride = cache.stride(0)
        if self.far is None:
            base = placed("k_cache", cache, memory, writable)
        else:
            base, stride = 1 << 40, self.far
            for number, page in enumerate(whole(cache).chunk(pages)):
                memory.add(f"page {number} of k_cache", page, writable=writable, address=base + number * stride)
        return {
            "cache": base, "page_stride_bytes": stride, "pool_tokens": pages * page_size, "page_size": page_size,
            "page_multiplier": multiplier, "page_shift": shift, "wide_pages": int((base | stride) % 16 == 0),
        }  # fmt: skip

    def _launch(self, role: str, rows: int, arguments: dict[str, int], memory: Memory) -> None:
        kernel = self.kernels[role]
        kernel.launch(blocks_for(kernel.plan, rows), arguments, memory, self.seed, self.schedule)


def placed(name: str, tensor: torch.Tensor, memory: Memory, writable: bool = True) -> int:
    """Address of a tensor's first element, its whole storage being there."""
    return memory.add(name, whole(tensor), writable=writable) + tensor.storage_offset() * tensor.element_size()


def problem(case: Any, kernels: EmulatedIndexCache, seed: int = 5) -> str:
    """What the check says of a case; nothing where all is right. Stops of the machine are raised."""
    try:
        IndexCacheRun(case, lambda _: kernels, torch.device("cpu"), seed).run()
    except WrongResultError as error:
        return str(error)
    return ""
