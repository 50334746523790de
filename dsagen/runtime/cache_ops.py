"""The methods of loaded kernels that fill and read caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsagen.arch import arch
from dsagen.families.kv_cache.family import EXTRA
from dsagen.families.kv_cache.op import RowsShape, explain_call
from dsagen.guard import require_bool
from dsagen.runtime import traced
from dsagen.runtime.blocks import Number
from dsagen.runtime.kv_cache import (
    FORMS,
    OP,
    bind_convert,
    bind_read,
    bind_write,
    cache_of,
    check_slots,
    check_table,
    make_out,
    out_arguments,
)
from dsagen.runtime.launch import OpLaunches, Step
from dsagen.runtime.op_methods import OpMethods


class CacheOps(OpMethods):
    """kv_write, kv_read and kv_convert over what `Kernels` provides."""

    # By role.
    _cache_launches: Mapping[str, OpLaunches]

    def kv_write(
        self,
        rows: torch.Tensor,
        k_cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        k_pe: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        extra: bool = False,
    ) -> None:
        """Quantise rows by the spec's rule and store them in a cache, on the current stream.

        - rows: [rows, d_qk] of the spec's `kv_write.rows`, at multiples of 16 B; [rows, d_nope] beside k_pe
        - k_cache: [pages, page_size, 1, columns] of the spec's KV format, pages any multiple of 16 bytes apart
        - slots: int32 or int64 [rows], page x page_size + offset; a negative one skips its row, one past the pool too
          (with DSAGEN_CHECK_INDICES it is an error). A slot that occurs twice gets a mixture of its rows
        - k_pe: [rows, d_rope], the rotary dims where they come apart
        - kpe_cache: the rotary dims' cache, for a format that has one
        - extra: write the spec's second cache

        Nothing but the named slots is written. Raises GuardError for what does not fit, FrozenError when the kernel
        would have to be loaded during capture or after freeze(), DeviceError when the driver refuses.
        """
        if torch.compiler.is_compiling():
            return traced.kv_write(self.handle, rows, k_cache, slots, k_pe=k_pe, kpe_cache=kpe_cache, extra=extra)
        call = (rows, k_cache, slots, k_pe, kpe_cache, extra)
        if not self._checks_values and self._cache_launches["write"].repeat(*call):
            return None
        self._require_op(OP)
        record, write = cache_of(self.spec, require_bool("extra", extra)), self.spec.kv_write
        assert write is not None
        tensors = {"rows": rows, "k_cache": k_cache, "slots": slots, "k_pe": k_pe, "kpe_cache": kpe_cache}
        arguments = bind_write(tensors, record, write.rows, self._driver)
        ordinal = self._home_of(rows)
        self._check_slots(ordinal, {"slots": (slots, arguments["pool_tokens"])})
        return self._launch_rows("write", extra, ordinal, arguments, call)

    def kv_read(
        self,
        k_cache: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        token_starts: torch.Tensor | None = None,
        rows: int | None = None,
        kpe_cache: torch.Tensor | None = None,
        extra: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of a cache as bf16 [rows, d_qk], each code times its scale in fp32, on the current stream.

        - k_cache, kpe_cache, extra: as for kv_write
        - slots: int32 or int64 [rows]; or, in place of it,
        - block_table: int32 [requests, pages], with row_starts: int32 [requests + 1], the first row of each request and
          the end of the last, and `rows` in all; token_starts: int32 [requests], the position of a request's first row
        - out: allocated where not given

        A row without a slot in the pool is zeros; with DSAGEN_CHECK_INDICES slots and pages past it, positions past the
        table and rows of requests that do not ascend are an error. Rows behind those of the last request and negative
        slots and pages are padding. Raises as kv_write does.
        """
        if torch.compiler.is_compiling():
            options = {
                "slots": slots,
                "block_table": block_table,
                "row_starts": row_starts,
                "token_starts": token_starts,
                "rows": rows,
                "kpe_cache": kpe_cache,
                "extra": extra,
            }
            return traced.kv_read(self.handle, k_cache, out, **options)
        sources = (k_cache, kpe_cache, slots, block_table, row_starts, token_starts)
        asked = (*sources, out, extra, rows)
        repeated = False if self._checks_values else self._cache_launches["read"].repeat(*asked)
        if repeated is not False:
            return out if repeated is True else repeated[0]  # type: ignore[return-value]
        self._require_op(OP)
        record = cache_of(self.spec, require_bool("extra", extra))
        tensors = {
            "k_cache": k_cache,
            "kpe_cache": kpe_cache,
            "slots": slots,
            "block_table": block_table,
            "row_starts": row_starts,
            "token_starts": token_starts,
            "out": out,
        }
        arguments = bind_read(tensors, record, rows, self._driver)
        ordinal = self._home_of(k_cache)
        self._check_slots(ordinal, {"slots": (slots, arguments["pool_tokens"])})
        if self._checks_values:
            check_table(tensors, arguments)
        result = make_out(out, int(arguments["rows_count"]), record, k_cache.device)
        call = (*sources, result, extra, rows)
        self._launch_rows("read", extra, ordinal, {**arguments, **out_arguments(result)}, call, asked)
        return result

    def kv_convert(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        source_slots: torch.Tensor | None = None,
        target_slots: torch.Tensor | None = None,
        extra: bool = False,
    ) -> None:
        """Copy tokens from a pool in the other layout of the spec's KV format into one in the spec's own.

        - source, target: [pages, page_size, 1, columns], of any page sizes and strides
        - source_slots, target_slots: int32 or int64 [rows], both or neither: then token i of the source becomes token i
          of the target. Slots that are negative or past their pool are left out
        - extra: of the spec's second cache

        Bytes are moved, not decoded. Raises as kv_write does.
        """
        slots = {"source_slots": source_slots, "target_slots": target_slots}
        if torch.compiler.is_compiling():
            return traced.kv_convert(self.handle, source, target, **slots, extra=extra)
        call = (source, target, source_slots, target_slots, extra)
        if not self._checks_values and self._cache_launches["convert"].repeat(*call):
            return None
        self._require_op(OP)
        record = cache_of(self.spec, require_bool("extra", extra))
        arguments = bind_convert({"source": source, "target": target, **slots}, record, self._driver)
        ordinal = self._home_of(source)
        pools = ("source_tokens", "target_tokens")
        self._check_slots(ordinal, {n: (t, arguments[p]) for (n, t), p in zip(slots.items(), pools, strict=True)})
        return self._launch_rows("convert", extra, ordinal, arguments, call)

    def _check_slots(self, ordinal: int, slots: Mapping[str, tuple[torch.Tensor | None, Number]]) -> None:
        if self._checks_values:
            self._refuse_capture(ordinal)
            for name, (tensor, pool_tokens) in slots.items():
                check_slots(name, tensor, pool_tokens)

    def _launch_rows(
        self,
        role: str,
        extra: bool,
        ordinal: int,
        arguments: Mapping[str, Number],
        call: tuple[Any, ...],
        asked: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch a role's kernel; `call` and `asked` are as OpLaunches.launch takes them, by FORMS."""
        shape = RowsShape(int(arguments["rows_count"]))
        if shape.rows:
            (plan,) = self._on(ordinal).by_role[OP, role + EXTRA if extra else role]
            step, stream = Step(self._loader.load(plan, ordinal), shape.blocks), self._driver.current_stream(ordinal)
            operands = call[: len(FORMS[role].tensors)]
            self._cache_launches[role].launch([step], stream, arguments, operands, call, asked)

    def _explain_rows(self, ordinal: int, rows: int) -> str:
        """What calls of the cache ops with that many rows take."""
        on = self._on(ordinal)
        plans = [plan for (op, _), plans in on.by_role.items() if op == OP for plan in plans]
        return explain_call(plans, RowsShape(rows), arch(on.arch))
