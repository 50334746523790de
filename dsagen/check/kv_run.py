"""Running one case of the cache ops on a device: poisoned pools, the call, and the comparison of every byte."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.cache import allocate_cache
from dsagen.check.cache_inputs import (
    DTYPES,
    GAP,
    PoolShape,
    copy_of,
    make_rows,
    make_slots,
    make_table,
    randomise,
    require_equal_bytes,
    whole,
)
from dsagen.check.kv_cases import REPEATS, Action, KvCase, Probe
from dsagen.check.probes import NotRunError, WrongResultError
from dsagen.families.kv_cache.geometry import other_layout
from dsagen.families.kv_cache.reference import convert_reference, read_reference, table_slots, write_reference
from dsagen.kv_format import KvFormat
from dsagen.spec import DeploymentSpec

_POISON = -7.0
_REPLAYS = 3

Caches = dict[str, Tensor]


class CacheKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def kv_write(self, rows: Tensor, k_cache: Tensor, slots: Tensor, **options: Any) -> None: ...  # noqa: D102
    def kv_read(self, k_cache: Tensor, **options: Any) -> Tensor: ...  # noqa: D102
    def kv_convert(self, source: Tensor, target: Tensor, **options: Any) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class KvCall:
    """Tensors of a call: `caches` are the pools of the op's format, `inputs` everything else by name."""

    caches: Caches
    inputs: dict[str, Tensor]

    def copy_from(self, other: KvCall) -> None:
        """Take another's contents, in place."""
        for mine, theirs in ((self.caches, other.caches), (self.inputs, other.inputs)):
            for name, tensor in mine.items():
                whole(tensor).copy_(whole(theirs[name]))


@dataclass(frozen=True)
class KvRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw."""

    case: KvCase
    kernels: Callable[[KvCase], CacheKernels]
    device: torch.device
    seed: int

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        kernels = self.kernels(self.case)
        if self.case.probe is Probe.GRAPH:
            self._replay(kernels)
            return
        times = REPEATS if self.case.probe is Probe.REPEATED else 1
        for _ in range(times):
            call = self.make_call(kernels.spec)
            before = copies_of(call.caches)
            self.compare(kernels.spec, call, before, self.call(kernels, call))

    def record(self, spec: DeploymentSpec) -> KvFormat:
        """The format of the cache that the case is about."""
        record = spec.extra_kv_format if self.case.extra else spec.kv_format
        assert record is not None, "a case is about a cache that the spec has"
        return record

    def make_call(self, spec: DeploymentSpec, variation: int = 0) -> KvCall:
        """Inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        case, record = self.case, self.record(spec)
        caches = allocate_cache(record, case.pages, case.page_size, self.device, case.pad_bytes)
        match case.action:
            case Action.WRITE:
                assert spec.kv_write is not None
                dtype = DTYPES[spec.kv_write.rows]
                inputs = {"rows": make_rows(case.rows, record.d_qk, case.contents, dtype, generator)}
                inputs["slots"] = self._slots(case.pages * case.page_size, generator, distinct=True)
            case Action.READ:
                inputs = {"slots": self._slots(case.pages * case.page_size, generator, distinct=False)}
            case Action.TABLE:
                inputs = make_table(case.rows, PoolShape(case.pages, case.page_size), generator)
            case Action.CONVERT:
                other = other_layout(record)
                assert other is not None, "a case converts where there are two layouts"
                (source,) = allocate_cache(other, case.pages + 3, case.page_size + 1, self.device, 32).values()
                randomise(source, generator)
                inputs = {"source": source}
                tokens = (source.shape[0] * source.shape[1], case.pages * case.page_size)
                for name, count in zip(("source_slots", "target_slots"), tokens, strict=True):
                    inputs[name] = self._slots(count, generator, distinct=True)
        if case.action in (Action.READ, Action.TABLE):
            for pool in caches.values():
                randomise(pool, generator)
        return KvCall(caches, inputs)

    def call(self, kernels: CacheKernels, call: KvCall, out: Tensor | None = None) -> Tensor | None:
        """Run the op on the current stream; the rows of a read, within wider ones of poison."""
        case, record, inputs = self.case, self.record(kernels.spec), dict(call.inputs)
        values = call.caches[record.segment("values").tensor]
        options: dict[str, Any] = {"extra": case.extra}
        if len(record.tensors) > 1:
            options["kpe_cache"] = call.caches[record.segment("rope").tensor]
        match case.action:
            case Action.WRITE:
                rows = inputs["rows"]
                if case.apart:
                    options["k_pe"], rows = rows[:, record.d_nope : record.d_qk], rows[:, : record.d_nope]
                else:
                    rows = rows[:, : record.d_qk]
                kernels.kv_write(rows, values, inputs["slots"], **options)
                return None
            case Action.CONVERT:
                kernels.kv_convert(inputs.pop("source"), values, **inputs, **options)
                return None
        if out is None:
            out = torch.full((case.rows, record.d_qk + GAP), _POISON, dtype=torch.bfloat16, device=self.device)
        if case.action is Action.TABLE:
            options["rows"] = case.rows
        found = kernels.kv_read(values, out=out[:, : record.d_qk], **inputs, **options)
        if found.data_ptr() != out.data_ptr():
            raise WrongResultError("the op did not return the output that it was given")
        return out

    def compare(self, spec: DeploymentSpec, call: KvCall, before: Caches, out: Tensor | None) -> None:
        """WrongResultError for the first byte of a pool, or element of a row, that differs from the reference."""
        record, inputs = self.record(spec), call.inputs
        if out is None:
            if self.case.action is Action.WRITE:
                assert spec.kv_write is not None
                rule = spec.kv_write.extra_rule if self.case.extra else spec.kv_write.rule
                rows = inputs["rows"][:, : record.d_qk]
                write_reference(record, before, rows, inputs["slots"], str(rule))
            else:
                other = other_layout(record)
                assert other is not None
                source = {"k_cache": inputs["source"]}
                convert_reference(other, source, record, before, inputs["source_slots"], inputs["target_slots"])
            for name, pool in call.caches.items():
                require_equal_bytes(name, pool, before[name])
            return
        slots = inputs["slots"] if self.case.action is Action.READ else self._table_slots(inputs)
        wanted = torch.full_like(out, _POISON)
        wanted[:, : record.d_qk] = read_reference(record, call.caches, slots)
        _require_equal_rows(out, wanted)
        for name, pool in call.caches.items():
            require_equal_bytes(name, pool, before[name])

    def _slots(self, tokens: int, generator: torch.Generator, *, distinct: bool) -> Tensor:
        return make_slots(self.case.rows, tokens, generator, distinct=distinct, wide=self.case.wide_slots)

    def _table_slots(self, inputs: dict[str, Tensor]) -> Tensor:
        table, starts, first = (inputs[name] for name in ("block_table", "row_starts", "token_starts"))
        return table_slots(table, starts, first, self.case.page_size, self.case.rows)

    def _replay(self, kernels: CacheKernels) -> None:
        if self.device.type != "cuda":
            raise NotRunError("needs a CUDA device")
        kernels.prepare()
        call = self.make_call(kernels.spec)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            out = self.call(kernels, call)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            self.call(kernels, call, out)
        for replay in range(_REPLAYS):
            call.copy_from(self.make_call(kernels.spec, variation=replay))
            before = copies_of(call.caches)
            if out is not None:
                out.fill_(_POISON)
            graph.replay()
            torch.cuda.synchronize(self.device)
            self.compare(kernels.spec, call, before, out)


def copies_of(caches: Caches) -> Caches:
    """The same pools over storages of their own."""
    return {name: copy_of(pool) for name, pool in caches.items()}


def _require_equal_rows(found: Tensor, wanted: Tensor) -> None:
    different = (found.view(torch.int16) != wanted.view(torch.int16)) & ~(found.isnan() & wanted.isnan())
    count = int(different.sum())
    if count:
        row, dim = different.nonzero()[0].tolist()
        raise WrongResultError(
            f"out[{row}, {dim}] = {float(found[row, dim])}, expected {float(wanted[row, dim])}; {count} elements differ"
        )
