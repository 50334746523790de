"""The methods of loaded kernels that fill and read the cache of index keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsagen.arch import arch
from dsagen.families.index_cache.op import blocks_for, explain_call
from dsagen.runtime import traced
from dsagen.runtime.blocks import Number
from dsagen.runtime.index_cache import (
    FORMS,
    OP,
    bind_gather,
    bind_write,
    make_outputs,
    output_arguments,
    require_both_outputs,
)
from dsagen.runtime.indexer import index_of
from dsagen.runtime.kv_cache import check_slots, check_table
from dsagen.runtime.launch import OpLaunches, Step
from dsagen.runtime.op_methods import OpMethods


class IndexCacheOps(OpMethods):
    """index_write and index_gather over what `Kernels` provides."""

    # By role.
    _index_launches: Mapping[str, OpLaunches]

    def index_write(self, keys: torch.Tensor, k_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise index keys by the spec's rule and store them in a cache, on the current stream.

        - keys: [keys, dim] of the spec's `index_write.rows`, rotated and transformed as the model has it, at multiples
          of 16 B
        - k_cache: [pages, page_size, 1, bytes of a key] of the spec's index-key format: codes of all keys of a page,
          then a scale word for each; pages any multiple of 4 bytes apart (of 16 where stores should be wide)
        - slots: int32 or int64 [keys or fewer], page x page_size + offset; a negative one skips its key, one past the
          pool too (with DSAGEN_CHECK_INDICES it is an error). Of more keys than slots the last ones are left out, as
          those are that pad a captured batch. A slot that occurs twice gets a mixture of its keys

        Nothing but the named slots is written. Raises GuardError for what does not fit, FrozenError when the kernel
        would have to be loaded during capture or after freeze(), DeviceError when the driver refuses.
        """
        if torch.compiler.is_compiling():
            return traced.index_write(self.handle, keys, k_cache, slots)
        call = (keys, k_cache, slots)
        if not self._checks_values and self._index_launches["write"].repeat(*call):
            return None
        self._require_op(OP)
        write = self.spec.index_write
        assert write is not None
        tensors = {"keys": keys, "k_cache": k_cache, "slots": slots}
        arguments = bind_write(tensors, index_of(self.spec), write.rows, self._driver)
        ordinal = self._home_of(keys)
        if self._checks_values:
            self._refuse_capture(ordinal)
            check_slots("slots", slots, arguments["pool_tokens"])
        return self._launch_keys("write", ordinal, arguments, call)

    def index_gather(
        self,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        row_starts: torch.Tensor,
        rows: int,
        *,
        token_starts: torch.Tensor | None = None,
        codes: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached index keys side by side, as bytes, on the current stream: (codes, scales).

        - k_cache: as for index_write
        - block_table: int32 [requests, pages]
        - row_starts: int32 [requests + 1], the first row of each request and the end of the last
        - rows: how many in all
        - token_starts: int32 [requests], the position of a request's first row; 0 where not given
        - codes: [rows, bytes of a key's codes], rows at multiples of 16 B: e4m3 [rows, dim], or for mxfp4 uint8 [rows,
          dim / 2]
        - scales: [rows], fp32, or for mxfp8 and mxfp4 int32 words of four ue8m0. Both are given or both allocated

        A row without a key in the pool is zeros; with DSAGEN_CHECK_INDICES pages past it, positions past the table and
        rows of requests that do not ascend are an error. Rows behind those of the last request and negative pages are
        padding. Raises as index_write does.
        """
        require_both_outputs(codes, scales)
        if torch.compiler.is_compiling():
            given = (k_cache, block_table, row_starts, rows)
            return traced.index_gather(self.handle, *given, token_starts, codes, scales)
        sources = (k_cache, block_table, row_starts, token_starts)
        asked = (*sources, codes, scales, rows)
        repeated = False if self._checks_values else self._index_launches["gather"].repeat(*asked)
        if repeated is not False:
            return (codes, scales) if repeated is True else tuple(repeated)
        self._require_op(OP)
        tensors = dict(zip(FORMS["gather"].tensors, (*sources, codes, scales), strict=True))
        index = index_of(self.spec)
        arguments = bind_gather(tensors, index, rows, self._driver)
        ordinal = self._home_of(k_cache)
        if self._checks_values:
            self._refuse_capture(ordinal)
            check_table(tensors, arguments)
        results = make_outputs(tensors, int(arguments["rows_count"]), index)
        call = (*sources, *results, rows)
        self._launch_keys("gather", ordinal, {**arguments, **output_arguments(*results)}, call, asked)
        return results

    def _launch_keys(
        self,
        role: str,
        ordinal: int,
        arguments: Mapping[str, Number],
        call: tuple[Any, ...],
        asked: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch a role's kernel; `call` and `asked` are as OpLaunches.launch takes them, by FORMS."""
        rows = int(arguments["rows_count"])
        if rows:
            (plan,) = self._on(ordinal).by_role[OP, role]
            step = Step(self._loader.load(plan, ordinal), blocks_for(plan, rows))
            stream = self._driver.current_stream(ordinal)
            operands = call[: len(FORMS[role].tensors)]
            self._index_launches[role].launch([step], stream, arguments, operands, call, asked)

    def _explain_keys(self, ordinal: int, rows: int) -> str:
        """What calls of the ops with that many keys take."""
        on = self._on(ordinal)
        plans = [plan for (op, _), plans in on.by_role.items() if op == OP for plan in plans]
        return explain_call(plans, rows, arch(on.arch))
