"""Other libraries' top-k on our inputs. Bindings only: nothing of theirs is part of dsagen.

Each is called as its users call it for this purpose: through a page table where it has one, else for plain indices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.bench.peer_import import import_peer
from dsagen.bench.topk_data import TopkBenchCase, TopkBenchInputs

TopkCall = Callable[[], Tensor]


class TopkPeer(Protocol):
    """One library's way to select."""

    @property
    def name(self) -> str:
        """Short name."""

    @property
    def version(self) -> str:
        """Version of the imported library; SpecError that says what to install when there is none."""

    def paged(self, case: TopkBenchCase) -> bool:
        """Whether its calls return ids of the page table; otherwise they return indices."""

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Why the library cannot run the case; None when it can."""

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """One callable for each input set; each returns ids [rows, k]. SpecError for a missing library."""


class TorchTopk:
    """torch.topk, unsorted."""

    name = "torch"

    @property
    def version(self) -> str:
        """Version of torch."""
        return str(torch.__version__)

    def paged(self, case: TopkBenchCase) -> bool:
        """Gives indices."""
        return False

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Runs everything."""
        return None

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """Values are written too, since it cannot leave them out."""
        return [lambda scores=item.scores: torch.topk(scores, case.k, dim=-1, sorted=False).indices for item in inputs]  # type: ignore[misc]


class SglKernel:
    """sglang-kernel's fast_topk_v2: fp32 and 2048 slots only; its page tables have pages of one token, so plain."""

    name = "sglang-kernel"
    requirement = "sglang-kernel==0.4.5"
    module = "sgl_kernel"
    SLOTS = 2048

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def paged(self, case: TopkBenchCase) -> bool:
        """Gives indices."""
        return False

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Has one kernel."""
        if case.score != "fp32" or case.k != self.SLOTS:
            return f"{self.name} selects {self.SLOTS} of fp32 scores only, not {case.k} of {case.score}"
        return None

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """Outputs are its own."""
        library = import_peer(self)
        return [functools.partial(library.fast_topk_v2, item.scores, item.lengths, case.k) for item in inputs]


class SglTopkV2:
    """sglang's JIT topk_v2: fp32. Through the page table up to 128 rows, by its prefill entry above."""

    name = "sglang-topk-v2"
    requirement = "sglang==0.5.23 apache-tvm-ffi==0.1.15.post2"
    module = "sglang"
    SUBMODULE = "kernels.ops.attention.dsv4.topk"
    PAGED_ROWS = 128
    MOST_SLOTS = 2048

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def paged(self, case: TopkBenchCase) -> bool:
        """As decode calls it, up to a batch's rows."""
        return case.rows <= self.PAGED_ROWS

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Reads fp32 only."""
        if case.score != "fp32":
            return f"{self.name} reads fp32 scores only, not {case.score}"
        return None if case.k <= self.MOST_SLOTS else f"{self.name} selects at most {self.MOST_SLOTS}, not {case.k}"

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """Of paged calls the plan is made once, as an engine makes it once for all layers of a step."""
        shape, device = (case.rows, case.k), inputs[0].scores.device
        if self.paged(case):
            select = self.selector(inputs[0].lengths, case.page_size)

            def paged(item: TopkBenchInputs) -> Tensor:
                return select(item.scores, item.page_table, torch.empty(shape, dtype=torch.int32, device=device))

            return [functools.partial(paged, item) for item in inputs]
        library = import_peer(self, self.SUBMODULE)
        offsets = torch.zeros(case.rows, dtype=torch.int32, device=device)

        def ragged(item: TopkBenchInputs) -> Tensor:
            out = torch.empty(shape, dtype=torch.int32, device=device)
            library.topk_transform_ragged_v2(item.scores, item.lengths, out_offsets=offsets, out_indices=out)
            return out

        return [functools.partial(ragged, item) for item in inputs]

    def selector(self, lengths: Tensor, page_size: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A call that takes scores, a page table and the ids' tensor, fills the last and returns it; planned here."""
        library = import_peer(self, self.SUBMODULE)
        plan = library.plan_topk_v2(lengths)

        def select(scores: Tensor, page_table: Tensor, out: Tensor) -> Tensor:
            library.topk_transform_paged_v2(scores, lengths, page_table, out, page_size, plan)
            return out

        return select


class DeepSelect:
    """DeepSelect as sglang carries it: fp32 and bf16, through the page table."""

    name = "deepselect"
    requirement = "sglang==0.5.23 apache-tvm-ffi==0.1.15.post2"
    module = "sglang"
    MOST_SLOTS = 4096

    @property
    def version(self) -> str:
        """Version of the library that carries it."""
        return str(import_peer(self).__version__)

    def paged(self, case: TopkBenchCase) -> bool:
        """Always."""
        return True

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Has buckets up to 4096 slots."""
        return None if case.k <= self.MOST_SLOTS else f"{self.name} selects at most {self.MOST_SLOTS}, not {case.k}"

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """Outputs are its own."""
        library = import_peer(self, "kernels.ops.attention.deep_select")
        return [
            functools.partial(
                library.topk_page_transform,
                item.scores,
                case.k,
                page_table=item.page_table,
                page_size=case.page_size,
                end=item.lengths,
            )
            for item in inputs
        ]


class FlashInferTopk:
    """flashinfer's top_k, plain or with the page table; its own rule picks the kernel."""

    requirement = "flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2"
    module = "flashinfer"

    def __init__(self, name: str, through_table: bool) -> None:
        self.name, self._through_table = name, through_table

    @property
    def version(self) -> str:
        """Version of the imported library."""
        return str(import_peer(self).__version__)

    def paged(self, case: TopkBenchCase) -> bool:
        """By which of its entries this is."""
        return self._through_table

    def refuses(self, case: TopkBenchCase) -> str | None:
        """Runs everything with pages of a power of two."""
        if self._through_table and case.page_size & (case.page_size - 1):
            return f"{self.name} needs pages of a power of two, not {case.page_size}"
        return None

    def bind(self, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> list[TopkCall]:
        """top_k returns values and indices; the other returns ids."""
        library: Any = import_peer(self)
        if not self._through_table:
            return [lambda scores=item.scores: library.top_k(scores, case.k)[1] for item in inputs]  # type: ignore[misc]
        return [
            functools.partial(
                library.top_k_page_table_transform,
                item.scores,
                item.page_table,
                item.lengths,
                case.k,
                page_size=case.page_size,
            )
            for item in inputs
        ]


TOPK_PEERS: tuple[TopkPeer, ...] = (
    TorchTopk(),
    SglKernel(),
    SglTopkV2(),
    DeepSelect(),
    FlashInferTopk("flashinfer", through_table=False),
    FlashInferTopk("flashinfer-paged", through_table=True),
)
