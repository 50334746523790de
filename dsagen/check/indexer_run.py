"""Running one case of the indexer's logits over keys in pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.indexer_inputs import LogitsInputs, make_inputs
from dsagen.check.outputs import GuardedTensor
from dsagen.check.scores_run import ScoresRun, magnitudes_of_codes, require_scores
from dsagen.families.indexer_logits.reference import limits_reference, logits_reference
from dsagen.index_format import SCALE_WORD_BYTES, IndexFormat
from dsagen.spec import DeploymentSpec, IndexSpec


class LogitsKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def indexer_logits(  # noqa: D102
        self, q: Tensor, k_cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, **options: Any
    ) -> Tensor: ...


@dataclass(frozen=True)
class LogitsRun(ScoresRun[LogitsCase, LogitsKernels, LogitsInputs]):
    """One case with keys in pages."""

    form: ClassVar[str] = "paged"

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and the width of a row."""
        return self.case.rows, self.case.width

    @property
    def strided(self) -> bool:
        """As the case says."""
        return self.case.strided

    def draw(self, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> LogitsInputs:
        """Inputs of the case."""
        return make_inputs(self.case, record, index, generator)

    def invoke(self, kernels: LogitsKernels, inputs: LogitsInputs, out: Tensor) -> Tensor:
        """Run the op on the current stream."""
        options: dict[str, Any] = {"unscored_up_to": self.case.unscored, "fill_neg_inf": self.case.fill, **inputs.named}
        return kernels.indexer_logits(*inputs.tensors, out=out, **options)

    def compare_scores(self, inputs: LogitsInputs, record: IndexFormat, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or was not to be written."""
        case, behind = self.case, None
        want, scored = logits_reference(
            *inputs.tensors, record, case.width, unscored_up_to=case.unscored, **inputs.named
        )
        if case.fill:
            most = min(case.width, inputs.block_table.shape[1] * case.page_size)
            limits = limits_reference(inputs.context_lens, case.batch, case.next_n, most).flatten()
            behind = torch.arange(case.width, device=self.device) >= limits[:, None]

        def size() -> Tensor:
            sized = with_magnitudes(record, inputs)
            return logits_reference(*sized.tensors, record, case.width, q_scales=inputs.q_scales)[0]

        require_scores(case, outputs, want, scored, behind, size)

    def parts(self, inputs: LogitsInputs) -> Iterator[tuple[str, slice, LogitsInputs]]:
        """The requests."""
        return requests_of(self.case, inputs)


class OfRequests(Protocol):
    """Tensors of a call over keys in pages."""

    def request(self, index: int) -> Self: ...  # noqa: D102


InputsT = TypeVar("InputsT", bound=OfRequests)


def requests_of(call: LogitsCase, inputs: InputsT) -> Iterator[tuple[str, slice, InputsT]]:
    """Calls of one request each: name, rows of scores, and inputs in the same memory."""
    for request in range(call.batch):
        rows = slice(request * call.next_n, (request + 1) * call.next_n)
        yield f"request {request}", rows, inputs.request(request)


def with_magnitudes(record: IndexFormat, inputs: LogitsInputs) -> LogitsInputs:
    """Inputs whose sums are those of magnitudes: |q|, |k| and |w| in place of q, k and w."""
    return replace(
        inputs,
        q=magnitudes_of_codes(record, inputs.q),
        k_cache=_magnitudes(record, inputs.k_cache),
        weights=inputs.weights.abs(),
    )


def _magnitudes(record: IndexFormat, cache: Tensor) -> Tensor:
    """A cache whose codes have no sign; scales have none."""
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage()).clone()
    pages, page_size, _, record_bytes = cache.shape
    code_bytes = record_bytes - SCALE_WORD_BYTES
    page = storage.as_strided((pages, page_size * code_bytes), (cache.stride(0), 1))
    page.copy_(magnitudes_of_codes(record, page))
    return storage.as_strided(cache.shape, cache.stride())
