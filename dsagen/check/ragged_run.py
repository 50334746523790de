"""Running one case of the logits over keys in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dsagen.check.indexer_cases import EDGES, Contents
from dsagen.check.indexer_inputs import as_codes, codes_of, query_scales, scales_of, weights_of, whole_storage
from dsagen.check.outputs import GuardedTensor
from dsagen.check.ragged_cases import RaggedCase, Windows
from dsagen.check.scores_run import ScoresRun, magnitudes_of_codes, require_scores
from dsagen.families.indexer_logits.reference import ragged_reference, window_reference
from dsagen.index_format import IndexFormat
from dsagen.spec import DeploymentSpec, IndexSpec


@dataclass(frozen=True)
class RaggedInputs:
    """Tensors of one call."""

    q: Tensor
    keys: Tensor
    key_scales: Tensor
    weights: Tensor
    starts: Tensor
    ends: Tensor
    q_scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Those that every call has, in the order of the op's arguments."""
        return self.q, self.keys, self.key_scales, self.weights, self.starts, self.ends

    @property
    def named(self) -> dict[str, Tensor]:
        """Those that the format asks for, by the names of the op's arguments."""
        return {} if self.q_scales is None else {"q_scales": self.q_scales}

    def copy_from(self, other: RaggedInputs) -> None:
        """Take another's contents, in place."""
        theirs = (*other.tensors, *other.named.values())
        for mine, new in zip((*self.tensors, *self.named.values()), theirs, strict=True):
            whole_storage(mine).copy_(whole_storage(new))

    def token(self, index: int) -> RaggedInputs:
        """The tensors of one token, in the same memory."""
        one = slice(index, index + 1)
        scales = None if self.q_scales is None else self.q_scales[one]
        rows = (self.weights[one], self.starts[one], self.ends[one], scales)
        return RaggedInputs(self.q[one], self.keys, self.key_scales, *rows)


def make_ragged_inputs(
    case: RaggedCase, record: IndexFormat, index: IndexSpec, generator: torch.Generator
) -> RaggedInputs:
    """Inputs of a case, on the generator's device. Keys that no token sees are NaN, as is what lies between keys."""
    device, heads, gap = generator.device, case.heads or index.heads, int(case.strided)
    row_bytes = record.code_bytes(index.dim)
    starts, ends = _windows(case, generator)
    first, count = window_reference(starts, ends, case.keys, case.max_window)
    position = torch.arange(case.keys, device=device)
    seen = ((position >= first[:, None]) & (position < (first + count)[:, None])).any(0)
    q = codes_of(case.contents, record, (case.tokens, heads + gap, row_bytes + 16 * gap), generator)
    keys = torch.full((case.keys, row_bytes + case.key_gap), 0xFF, dtype=torch.uint8, device=device)
    codes = codes_of(case.contents, record, (case.keys, row_bytes), generator)
    if case.contents is Contents.NAN_KEYS:
        codes[::5, 3] = 0xFF
    keys[:, :row_bytes] = torch.where(seen[:, None], codes, 0xFF)
    words = scales_of(case.contents, record, case.keys, index.dim, generator)
    scales = torch.full((case.keys, 1 + gap), -1, dtype=torch.int32, device=device)
    scales[:, 0] = torch.where(seen, words.view(torch.int32), -1)
    weights = weights_of(case.contents, (case.tokens, heads + 3 * gap), generator)
    q_words = query_scales(case.contents, record, (case.tokens, heads + 3 * gap), index.dim, generator)
    return RaggedInputs(
        as_codes(record, q[:, :heads, :row_bytes]),
        as_codes(record, keys)[:, :row_bytes],
        scales[:, 0] if record.is_block_scaled else scales.view(torch.float32)[:, 0],
        weights[:, :heads],
        _spread(starts, gap),
        _spread(ends, 2 * gap),
        None if q_words is None else q_words[:, :heads],
    )


def _windows(case: RaggedCase, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int32 (starts, ends)."""
    device, keys, tokens = generator.device, case.keys, case.tokens

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (tokens,), device=device, generator=generator, dtype=torch.int32)

    number = torch.arange(tokens, device=device, dtype=torch.int32)
    match case.windows:
        case Windows.PROMPTS:
            size = max(1, -(-tokens // 3))
            start = number // size * (keys // 4)
            return start, (start + keys // 4 + number % size).clamp(max=keys)
        case Windows.EDGES:
            edges = torch.tensor(EDGES, dtype=torch.int32, device=device).repeat(-(-tokens // len(EDGES)))[:tokens]
            start = (number * 13 + 1) % max(1, keys // 2)
            return start, (start + edges).clamp(max=keys)
        case Windows.BEYOND:
            return drawn(-keys, 2 * keys), drawn(-keys, 3 * keys)
        case Windows.EMPTY:
            start = drawn(-5, keys + 5)
            return start, start - number % 3
        case Windows.WHOLE:
            return torch.zeros_like(number), torch.full_like(number, keys)
        case Windows.APART:
            start = number % 2 * (keys - keys // 5)
            return start, start + keys // 5
        case _:
            ends = torch.stack((drawn(0, keys + 1), drawn(0, keys + 1))).sort(0).values
            ends[:, -1] = torch.tensor((0, keys), dtype=torch.int32, device=device)
            return ends[0], ends[1]


def _spread(values: Tensor, gap: int) -> Tensor:
    """The same values, `gap` elements between them."""
    whole = torch.full((len(values), 1 + gap), 1 << 30, dtype=values.dtype, device=values.device)
    whole[:, 0] = values
    return whole[:, 0]


class RaggedKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def indexer_logits_ragged(  # noqa: D102
        self,
        q: Tensor,
        keys: Tensor,
        key_scales: Tensor,
        weights: Tensor,
        starts: Tensor,
        ends: Tensor,
        **options: Any,
    ) -> Tensor: ...


@dataclass(frozen=True)
class RaggedRun(ScoresRun[RaggedCase, RaggedKernels, RaggedInputs]):
    """One case with keys in one piece."""

    form: ClassVar[str] = "ragged"

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and columns of a row."""
        return self.case.tokens, self.case.columns

    @property
    def strided(self) -> bool:
        """As the case says."""
        return self.case.strided

    def draw(self, record: IndexFormat, index: IndexSpec, generator: torch.Generator) -> RaggedInputs:
        """Inputs of the case."""
        return make_ragged_inputs(self.case, record, index, generator)

    def invoke(self, kernels: RaggedKernels, inputs: RaggedInputs, out: Tensor) -> Tensor:
        """Run the op on the current stream."""
        case = self.case
        options: dict[str, Any] = {"unscored_up_to": case.unscored, "fill_neg_inf": case.fill, **inputs.named}
        return kernels.indexer_logits_ragged(*inputs.tensors, max_window=case.max_window, out=out, **options)

    def compare_scores(self, inputs: RaggedInputs, record: IndexFormat, outputs: GuardedTensor) -> None:
        """WrongResultError for the first score that differs from the reference, or was not to be written."""
        case = self.case
        given: Any = (*inputs.tensors, record, case.max_window)
        want, scored = ragged_reference(*given, q_scales=inputs.q_scales, unscored_up_to=case.unscored)
        outside = ~ragged_reference(*given, q_scales=inputs.q_scales)[1] if case.fill else None

        def size() -> Tensor:
            sized = replace(
                inputs,
                q=magnitudes_of_codes(record, inputs.q),
                keys=magnitudes_of_codes(record, inputs.keys),
                weights=inputs.weights.abs(),
            )
            given: Any = (*sized.tensors, record, case.max_window)
            return ragged_reference(*given, q_scales=inputs.q_scales)[0]

        require_scores(case, outputs, want, scored, outside, size)

    def parts(self, inputs: RaggedInputs) -> Iterator[tuple[str, slice, RaggedInputs]]:
        """The tokens."""
        for token in range(self.case.tokens):
            yield f"token {token}", slice(token, token + 1), inputs.token(token)
