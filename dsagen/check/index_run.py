"""Running one case of the index cache's ops on a device: poisoned pools, the call, every byte compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.cache_inputs import (
    DTYPES,
    PoolShape,
    copy_of,
    make_rows,
    make_slots,
    make_table,
    randomise,
    require_equal_bytes,
    whole,
)
from dsagen.check.index_cases import REPEATS, Action, IndexCacheCase
from dsagen.check.kv_cases import Probe
from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.families.index_cache.reference import gather_reference, write_reference
from dsagen.families.kv_cache.reference import table_slots
from dsagen.index_format import SCALE_WORD_BYTES, IndexFormat, index_format
from dsagen.spec import DeploymentSpec, IndexSpec

_POISON = 0xA5
_REPLAYS = 3
# Bytes behind each row of codes that has gaps, and words from scale to scale.
_CODE_GAP, _SCALE_STEP = 48, 3


class IndexCacheKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def index_write(self, keys: Tensor, k_cache: Tensor, slots: Tensor) -> None: ...  # noqa: D102
    def index_gather(  # noqa: D102
        self, k_cache: Tensor, block_table: Tensor, row_starts: Tensor, rows: int, **options: Any
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class IndexCacheCall:
    """Tensors of a call; `outputs` are those of a gather, within larger ones of poison."""

    cache: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def copy_from(self, other: IndexCacheCall) -> None:
        """Take another's contents, in place."""
        whole(self.cache).copy_(whole(other.cache))
        for name, tensor in self.inputs.items():
            whole(tensor).copy_(whole(other.inputs[name]))
        for tensor in self.outputs.values():
            whole(tensor).fill_(_POISON)


@dataclass(frozen=True)
class IndexCacheRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: IndexCacheCase
    kernels: Callable[[IndexCacheCase], IndexCacheKernels]
    device: torch.device
    seed: int

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        kernels = self.kernels(self.case)
        if self.case.probe is Probe.GRAPH:
            self._replay(kernels)
            return
        for _ in range(REPEATS if self.case.probe is Probe.REPEATED else 1):
            call = self.make_call(kernels.spec)
            before = copy_of(call.cache)
            self.call(kernels, call)
            self.compare(kernels.spec, call, before)

    def make_call(self, spec: DeploymentSpec, variation: int = 0) -> IndexCacheCall:
        """Inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        case, (index, record) = self.case, _index_of(spec)
        cache = poisoned_cache(record, index.dim, PoolShape(case.pages, case.page_size), case.pad_bytes, self.device)
        if case.action is Action.WRITE:
            assert spec.index_write is not None, "a spec with the op has how keys are written"
            dtype = DTYPES[spec.index_write.rows]
            keys = make_rows(case.rows + case.spare_keys, index.dim, case.contents, dtype, generator)
            tokens = case.pages * case.page_size
            slots = make_slots(case.rows, tokens, generator, distinct=True, wide=case.wide_slots)
            return IndexCacheCall(cache, {"keys": keys, "slots": slots}, {})
        randomise(cache, generator)
        table = make_table(case.rows, PoolShape(case.pages, case.page_size), generator)
        return IndexCacheCall(cache, table, self._outputs(record, index.dim))

    def call(self, kernels: IndexCacheKernels, call: IndexCacheCall) -> None:
        """Run the op on the current stream."""
        inputs = dict(call.inputs)
        if self.case.action is Action.WRITE:
            index, _ = _index_of(kernels.spec)
            kernels.index_write(inputs["keys"][:, : index.dim], call.cache, inputs["slots"])
            return
        found = kernels.index_gather(call.cache, rows=self.case.rows, **inputs, **call.outputs)
        if [tensor.data_ptr() for tensor in found] != [tensor.data_ptr() for tensor in call.outputs.values()]:
            raise WrongResultError("the op did not return the outputs that it was given")

    def compare(self, spec: DeploymentSpec, call: IndexCacheCall, before: Tensor) -> None:
        """WrongResultError for the first byte of the pool, or of an output, that differs from the reference."""
        index, record = _index_of(spec)
        inputs = call.inputs
        if self.case.action is Action.WRITE:
            assert spec.index_write is not None
            write_reference(record, before, inputs["keys"][:, : index.dim], inputs["slots"], spec.index_write.rule)
        else:
            table, starts, first = (inputs[name] for name in ("block_table", "row_starts", "token_starts"))
            slots = table_slots(table, starts, first, self.case.page_size, self.case.rows)
            wanted = gather_reference(record, call.cache, index.dim, slots)
            for (name, found), bytes_of in zip(call.outputs.items(), wanted, strict=True):
                copy = copy_of(found)
                whole(copy).fill_(_POISON)
                copy.view(torch.uint8 if name == "codes" else torch.int32).copy_(
                    bytes_of if name == "codes" else bytes_of.view(torch.int32).squeeze(1)
                )
                require_equal_bytes(name, found, copy)
        require_equal_bytes("k_cache", call.cache, before)

    def _outputs(self, record: IndexFormat, dim: int) -> dict[str, Tensor]:
        case, code_bytes = self.case, record.code_bytes(dim)
        gap, step = (_CODE_GAP, _SCALE_STEP) if case.strided else (0, 1)
        codes = torch.full((case.rows + 1, code_bytes + gap), _POISON, dtype=torch.uint8, device=self.device)
        # One row and one scale more than the call has.
        scales = torch.full(
            ((case.rows + 1) * step * SCALE_WORD_BYTES,), _POISON, dtype=torch.uint8, device=self.device
        )
        typed = scales.view(torch.int32 if record.is_block_scaled else torch.float32)
        return {"codes": codes[: case.rows, :code_bytes], "scales": typed[: case.rows * step : step]}

    def _replay(self, kernels: IndexCacheKernels) -> None:
        if self.device.type != "cuda":
            raise NotRunError("needs a CUDA device")
        kernels.prepare()
        call = self.make_call(kernels.spec)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.call(kernels, call)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            self.call(kernels, call)
        for replay in range(_REPLAYS):
            call.copy_from(self.make_call(kernels.spec, variation=replay))
            before = copy_of(call.cache)
            graph.replay()
            torch.cuda.synchronize(self.device)
            self.compare(kernels.spec, call, before)


def poisoned_cache(
    record: IndexFormat, dim: int, shape: PoolShape, pad_bytes: int, device: torch.device | str
) -> Tensor:
    """A cache [pages, page_size, 1, bytes of a key], pages `pad_bytes` apart: 0xFF in even ones, 0x7F in odd ones."""
    record_bytes = record.record_bytes(dim)
    stride = record.page_bytes(dim, shape.page_size) + pad_bytes
    pool = torch.empty((shape.pages, stride), dtype=torch.uint8, device=device)
    pool[0::2], pool[1::2] = 0xFF, 0x7F
    return pool.as_strided((shape.pages, shape.page_size, 1, record_bytes), (stride, record_bytes, record_bytes, 1))


def _index_of(spec: DeploymentSpec) -> tuple[IndexSpec, IndexFormat]:
    assert spec.index is not None, "a spec with the op has an index"
    return spec.index, index_format(spec.index.keys)
