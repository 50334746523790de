"""Other libraries' indexer logits on our inputs. Bindings only: nothing of theirs is part of dsagen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.bench.logits_data import LogitsBenchCase, LogitsBenchInputs
from dsagen.bench.peer_import import import_peer

LogitsCall = Callable[[], Tensor]


class LogitsPeer(Protocol):
    """One library's way to score index keys."""

    @property
    def name(self) -> str:
        """Short name."""

    @property
    def version(self) -> str:
        """Version of the imported library; SpecError that says what to install when there is none."""

    def refuses(self, case: LogitsBenchCase) -> str | None:
        """Why the library cannot run the case; None when it can."""

    def bind(self, case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs]) -> list[LogitsCall]:
        """One callable for each input set; each returns scores [tokens, columns]. SpecError for a missing library."""


class DeepGemm:
    """DeepGEMM as sglang ships it: fp8 keys with a fp32 scale, 32 or 64 heads. Its schedule is made once a step."""

    name = "deep_gemm"
    requirement = "sgl-deep-gemm==0.1.4.post1"
    module = "deep_gemm"
    HEADS = (32, 64)
    MOST_NEXT_N = 2

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def refuses(self, case: LogitsBenchCase) -> str | None:
        """Has kernels for few shapes."""
        if case.keys != "fp8" or case.score != "fp32":
            return f"{self.name} gives fp32 scores of fp8 keys here, not {case.score} of {case.keys}"
        if case.heads not in self.HEADS:
            return f"{self.name} has {' and '.join(map(str, self.HEADS))} heads, not {case.heads}"
        if case.form == "paged" and (case.next_n > self.MOST_NEXT_N or case.page_size != 64):
            return f"{self.name} takes up to {self.MOST_NEXT_N} tokens a request and pages of 64"
        return None

    def bind(self, case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs]) -> list[LogitsCall]:
        """Outputs are its own. Nothing is filled in outside of windows."""
        library: Any = import_peer(self)
        if case.form == "ragged":
            most = {"max_seqlen_k": case.kv_tokens} if case.compressed else {}

            def ragged(item: LogitsBenchInputs) -> Tensor:
                keys = (item.keys, item.key_scales)
                return _as_torch(
                    library.fp8_mqa_logits(
                        item.q, keys, item.weights, item.starts, item.lengths, clean_logits=False, **most
                    )
                )

            return [functools.partial(ragged, item) for item in inputs]
        sms = torch.cuda.get_device_properties(inputs[0].q.device).multi_processor_count
        schedule = library.get_paged_mqa_logits_metadata(inputs[0].lengths, case.page_size, sms)

        def paged(item: LogitsBenchInputs) -> Tensor:
            rest = (item.weights, item.lengths, item.block_table, schedule, case.kv_tokens)
            return _as_torch(library.fp8_paged_mqa_logits(item.q, item.k_cache, *rest, clean_logits=False))

        return [functools.partial(paged, item) for item in inputs]


def _as_torch(found: Any) -> Tensor:
    """The library's results come through another framework's interface, as a tensor of its own at times."""
    return found if isinstance(found, Tensor) else torch.utils.dlpack.from_dlpack(found)


LOGITS_PEERS: tuple[LogitsPeer, ...] = (DeepGemm(),)
