"""Running one case of a decode step: the chain is held to the composition of its stages' references.

Scores that are exact are compared to the bit. Whatever the scores are, what was selected has to be the exact top-k of
them, and attention has to be over that: of candidate blocks likewise, which have to be the best by exact scores of
blocks. What nothing may read, unselected tokens of the KV cache among it, is NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.cache import allocate_cache, natural_rule, quantise_rows, write_tokens
from dsagen.check.compare import Gates, compare_decode
from dsagen.check.indexer_cases import Contents, LogitsCase
from dsagen.check.indexer_inputs import LogitsInputs, as_codes, codes_of, query_scales, weights_of
from dsagen.check.indexer_inputs import make_inputs as make_index_inputs
from dsagen.check.outputs import DecodeOutputs
from dsagen.check.probes import WrongResultError, cache_arguments
from dsagen.check.step_cases import REPEATS, WINDOW, WINDOW_TOKENS, Probe, Selects, StepCase
from dsagen.check.step_selections import Blocks, References, Selection
from dsagen.check.topk_run import Run, cuda_capture
from dsagen.families.sparse_decode.reference import Source, sparse_decode_reference
from dsagen.index_format import index_format
from dsagen.kv_format import KvFormat
from dsagen.spec import DeploymentSpec

_INTEGERS = {torch.float32: (torch.int32, 0x7FDEAD55), torch.bfloat16: (torch.int16, 0x7FD5)}
_POISON = -77
_REPLAYS = 3
# Errors of scores that are not exact, against the largest of their row.
_SCORE_ERROR = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-7}
# Where products keep 13 bits, in what weights of both signs have left of their sums.
_SHORT_SUM_ERROR = 2.0**-8
_GROUP_DIMS = 128
# What the step is told of a layer that selects.
_MODES: Mapping[Selects, str | None] = {Selects.ALL: None, Selects.CHOOSE: "choose", Selects.USE: "use"}


def score_error(dtype: torch.dtype, short_sums: bool) -> float:
    """What scores of a step that are not exact may be off by, as a part of the largest of their row."""
    return _SCORE_ERROR[dtype] + (_SHORT_SUM_ERROR if short_sums else 0.0)


class StepKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    @property
    def can_overlap(self) -> bool: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def plan_decode_step(self, batch: int, next_n: int, max_seq_len: int, **options: Any) -> Any: ...  # noqa: D102
    def decode_step_slugs(self, plan: Any, candidates: str | None = None) -> tuple[str, ...]: ...  # noqa: D102
    def decode_step(self, q: Tensor, k_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]: ...  # noqa: D102


@dataclass(frozen=True)
class Layer:
    """One layer: q, the cache that is selected from, beside it the window where there are two, and what it selects by.

    `index` is None where it attends to what another one has selected.
    """

    q: Tensor
    record: KvFormat
    caches: Mapping[str, Tensor]
    window: Source | None
    selects: Selects = Selects.ALL
    index: LogitsInputs | None = None


@dataclass(frozen=True)
class StepInputs:
    """A step's tensors: the KV cache's own table where it has one, and those of each layer."""

    kv_table: Tensor | None
    layers: tuple[Layer, ...]

    @property
    def index(self) -> LogitsInputs:
        """What the first layer selects by; its lengths and tables are those of all."""
        assert self.layers[0].index is not None, "a step begins with a layer that selects"
        return self.layers[0].index

    @property
    def page_size(self) -> int:
        """Tokens of a page of the caches that are selected from."""
        return int(next(iter(self.layers[0].caches.values())).shape[1])

    def copy_from(self, other: StepInputs) -> None:
        """Take another's contents, in place."""
        pairs = [(self.kv_table, other.kv_table)]
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine.index is not None and theirs.index is not None:
                mine.index.copy_from(theirs.index)
            pairs.append((mine.q, theirs.q))
            pairs += [(cache, theirs.caches[name]) for name, cache in mine.caches.items()]
            if mine.window is not None and theirs.window is not None:
                assert isinstance(mine.window.caches, Mapping) and isinstance(theirs.window.caches, Mapping)
                pairs.append((mine.window.indices, theirs.window.indices))
                pairs += [(cache, theirs.window.caches[name]) for name, cache in mine.window.caches.items()]
        for into, new in pairs:
            if into is not None and new is not None:
                into.copy_(new)


@dataclass(frozen=True)
class StepRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw.

    `launched` gets the names of the kernels that the step launches.
    """

    case: StepCase
    kernels: Callable[[StepCase], StepKernels]
    device: torch.device
    seed: int
    capture: Callable[[Run, torch.device], Run] = field(default=cuda_capture)
    launched: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of a device."""
        case, kernels = self.case, self.kernels(self.case)
        inputs = self.inputs(kernels)
        options: dict[str, Any] = {"k": case.k, "num_splits": case.num_splits}
        if case.probe is Probe.REPEATED:
            options["determinism"] = "order"
        if case.candidate_blocks is not None:
            options["candidate_blocks"] = case.candidate_blocks
        if kernels.spec.extra_kv is not None:
            options["window"] = WINDOW
        if case.overlap and kernels.can_overlap:
            options["overlap"] = True
        plan = kernels.plan_decode_step(case.batch, case.next_n, case.width, **options)
        for selects in dict.fromkeys(case.layers):
            if selects is not Selects.AGAIN:
                self.launched.update(kernels.decode_step_slugs(plan, _MODES[selects]))
        outputs = self.outputs(kernels)

        def call() -> None:
            self.call(kernels, plan, inputs, outputs)

        if case.probe is Probe.GRAPH:
            self._replay(kernels, plan, inputs, outputs, call)
            return
        self.poison(plan, outputs)
        call()
        first = [tensor.clone() for tensor in _bits(plan, outputs)]
        self.compare(kernels, plan, inputs, outputs)
        for number in range(2, 1 + (REPEATS if case.probe is Probe.REPEATED else 1)):
            self.poison(plan, outputs)
            call()
            for was, now in zip(first, _bits(plan, outputs), strict=True):
                if not torch.equal(was, now):
                    raise WrongResultError(f"run {number} differs from the first")

    # ---- inputs

    def inputs(self, kernels: StepKernels, variation: int = 0) -> StepInputs:
        """The inputs of the case, or others of the same shapes."""
        case, spec = self.case, kernels.spec
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {case.name} {variation}".encode()))
        assert spec.index is not None, "a spec with the op has an index"
        logits = LogitsCase(
            case.name, case.batch, case.next_n, case.width, case.page_size, case.pad_bytes,
            contents=case.contents, lengths=case.lengths,
        )  # fmt: skip
        index = make_index_inputs(logits, index_format(spec.index.keys), spec.index, generator)
        pages, page_size, table = int(index.k_cache.shape[0]), case.page_size, None
        if case.kv_page_size is not None:
            page_size = case.kv_page_size
            columns = -(-case.width // page_size)
            pages = case.batch * columns + 1
            order = torch.randperm(pages, device=self.device, generator=generator)
            table = order[: case.batch * columns].int().view(case.batch, columns)
        indexes: list[LogitsInputs | None] = []
        for number, selects in enumerate(case.layers):
            first = index if number == 0 else self._other_index(spec, index, generator)
            indexes.append(None if selects is Selects.AGAIN else first)
        readable = self._readable(References(case, spec, page_size, table), indexes)
        layers = [self._layer(spec, pages, page_size, slots, generator) for slots in readable]
        told = zip(layers, case.layers, indexes, strict=True)
        return StepInputs(table, tuple(replace(layer, selects=selects, index=of) for layer, selects, of in told))

    def _other_index(self, spec: DeploymentSpec, first: LogitsInputs, generator: torch.Generator) -> LogitsInputs:
        """What another layer selects by: queries and weights of its own, over the same keys."""
        case, index = self.case, spec.index
        assert index is not None
        record, shape = index_format(index.keys), (case.batch, case.next_n, index.heads)
        return replace(
            first,
            q=as_codes(record, codes_of(case.contents, record, (*shape, record.code_bytes(index.dim)), generator)),
            weights=weights_of(case.contents, (case.rows, index.heads), generator),
            q_scales=query_scales(case.contents, record, shape, index.dim, generator),
        )

    def _readable(self, references: References, indexes: Sequence[LogitsInputs | None]) -> list[Tensor]:
        """Slots of each layer's KV cache that hold tokens: those that it selects, or where scores are not exact all."""
        if self.case.contents is Contents.INTEGER:
            ids = [selection.ids for selection in self._selections(references, self.case.layers, indexes)]
        else:
            assert indexes[0] is not None
            every = references.select(references.scores(indexes[0])[0], indexes[0], self.case.width).ids
            ids = [every] * len(indexes)
        return [torch.unique(of_layer[of_layer >= 0]) for of_layer in ids]

    def _layer(
        self, spec: DeploymentSpec, pages: int, page_size: int, slots: Tensor, generator: torch.Generator
    ) -> Layer:
        case, record = self.case, spec.extra_kv_format or spec.kv_format
        caches = self._cache(spec, record, pages, page_size, slots, generator)
        shape = (case.batch, case.next_n, spec.heads, record.d_qk)
        q = torch.randn(shape, device=self.device, generator=generator).bfloat16()
        if spec.extra_kv_format is None:
            return Layer(q, record, caches, None)
        tokens = torch.arange(WINDOW_TOKENS, device=self.device)
        window = self._cache(spec, spec.kv_format, -(-WINDOW_TOKENS // 16), 16, tokens, generator)
        ids = torch.randint(
            -1, WINDOW_TOKENS, (case.batch, case.next_n, WINDOW), device=self.device, generator=generator
        )
        return Layer(q, record, caches, Source(spec.kv_format, window, ids.int()))

    def _cache(
        self,
        spec: DeploymentSpec,
        record: KvFormat,
        pages: int,
        page_size: int,
        slots: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """A cache with rows at some slots, one for each KV head; everything else is poison."""
        heads = spec.kv_heads
        caches = allocate_cache(record, pages, page_size * heads, self.device)
        rows = (slots[:, None] * heads + torch.arange(heads, device=self.device)).flatten()
        x = torch.randn((rows.numel(), record.row_dims), device=self.device, generator=generator) / 10
        write_tokens(record, caches, rows, quantise_rows(record, x.clamp(-1, 1).bfloat16(), natural_rule(record)))
        return {name: cache.view(pages, page_size, heads, -1) for name, cache in caches.items()}

    # ---- the call

    def outputs(self, kernels: StepKernels) -> list[DecodeOutputs]:
        """Outputs of each layer."""
        spec, case = kernels.spec, self.case
        return [
            DecodeOutputs.make(case.batch, case.next_n, spec.heads, spec.dims.d_v, self.device) for _ in case.layers
        ]

    def poison(self, plan: Any, outputs: list[DecodeOutputs]) -> None:
        """As if nothing had been written."""
        integer, poison = _INTEGERS[plan.scores.dtype]
        plan.scores.view(integer).fill_(poison)
        plan.ids.fill_(_POISON)
        plan.counts.fill_(_POISON)
        if plan.candidates is not None:
            level = plan.candidates
            level.block_scores.view(integer).fill_(poison)
            level.compact.view(integer).fill_(poison)
            for tensor in (level.block_counts, level.blocks, level.pages):
                tensor.fill_(_POISON)
        for output in outputs:
            output.out.poison_again()
            output.lse_rows.poison_again()

    def call(self, kernels: StepKernels, plan: Any, inputs: StepInputs, outputs: list[DecodeOutputs]) -> None:
        """All layers of the step, on the current stream."""
        for layer, output in zip(inputs.layers, outputs, strict=True):
            selecting = {"reuse_ids": True} if layer.index is None else selecting_arguments(layer, inputs.kv_table)
            options: dict[str, Any] = {**layer_arguments(layer), **selecting, "softmax_scale": layer.record.d_qk**-0.55}
            out, lse = kernels.decode_step(layer.q, plan=plan, out=output.out.view, lse=output.lse, **options)
            if (out.data_ptr(), lse.data_ptr()) != (output.out.view.data_ptr(), output.lse.data_ptr()):
                raise WrongResultError("the step did not return the outputs that it was given")

    def _replay(
        self, kernels: StepKernels, plan: Any, inputs: StepInputs, outputs: list[DecodeOutputs], call: Run
    ) -> None:
        kernels.prepare()
        replay = self.capture(call, self.device)
        for variation in range(_REPLAYS):
            inputs.copy_from(self.inputs(kernels, variation))
            self.poison(plan, outputs)
            replay()
            self.compare(kernels, plan, inputs, outputs)

    # ---- the comparison

    def compare(self, kernels: StepKernels, plan: Any, inputs: StepInputs, outputs: list[DecodeOutputs]) -> None:
        """WrongResultError for the first stage that does not give what its reference does."""
        case, spec = self.case, kernels.spec
        references = References(case, spec, inputs.page_size, inputs.kv_table)
        indexes = [layer.index for layer in inputs.layers]
        selections = self._selections(references, case.layers, indexes, plan)
        want = selections[-1]
        found, counts = plan.ids.view(case.rows, case.k).long(), plan.counts.view(-1).long()
        _require_equal("counts", counts[:, None], want.counts[:, None])
        behind = torch.arange(case.k, device=self.device) >= want.counts[:, None]
        _require_equal("ids behind the count", found.masked_fill(~behind, -1), torch.full_like(found, -1))
        _require_equal("ids as a set", found.sort(1).values, want.ids.sort(1).values)
        if case.probe is Probe.REPEATED:
            _require_equal("ids in order", found, want.ids)
        for number, (layer, selection, output) in enumerate(zip(inputs.layers, selections, outputs, strict=True)):
            ids = selection.ids.int().view(case.batch, case.next_n, case.k)
            problem = self._attention_problem(spec, layer, ids, output)
            if problem:
                raise WrongResultError(f"layer {number}: {problem}")

    def _selections(
        self,
        references: References,
        layers: Sequence[Selects],
        indexes: Sequence[LogitsInputs | None],
        plan: Any = None,
    ) -> list[Selection]:
        """What each layer should select; with a plan by the scores that are left in it, once they are compared."""
        last = {selects is Selects.USE: number for number, selects in enumerate(layers) if selects is not Selects.AGAIN}
        selections: list[Selection] = []
        blocks: Blocks | None = None
        for number, (selects, index) in enumerate(zip(layers, indexes, strict=True)):
            left = None if plan is None or last.get(selects is Selects.USE) != number else plan
            if index is None:
                selections.append(selections[-1])
            elif selects is Selects.USE:
                assert blocks is not None, "an earlier layer chooses"
                compact = self._inside(references, index, blocks, left)
                selections.append(references.select_inside(compact, index, blocks.chosen))
            else:
                scores = self._scores(references, index, selects is Selects.CHOOSE, left)
                selections.append(references.select(scores, index, self.case.k))
                if selects is Selects.CHOOSE:
                    blocks = references.choose(scores, index)
                    if plan is not None:
                        _compare_blocks(plan.candidates, blocks)
        return selections

    def _attention_problem(self, spec: DeploymentSpec, layer: Layer, ids: Tensor, output: DecodeOutputs) -> str:
        selected = Source(layer.record, layer.caches, ids)
        first, extra = (selected, None) if layer.window is None else (layer.window, selected)
        want = sparse_decode_reference(
            layer.q, first.record, first.caches, first.indices, sm_scale=layer.record.d_qk**-0.55,
            lse_base=spec.lse.base, empty_lse=float(spec.lse.empty), extra=extra,
        )  # fmt: skip
        out, lse = output.rows()
        group_dims = layer.record.scale_group_dims or _GROUP_DIMS
        gates = Gates().for_logits(want.peak)
        compared = compare_decode(out, lse, want.out, want.lse, group_dims, gates)
        # Last, since it poisons what was written.
        written = output.out.written_outside() + output.lse_rows.written_outside() if compared.passed else 0
        return compared.problem or (f"{written} elements outside of the outputs were written" if written else "")

    def _scores(self, references: References, index: LogitsInputs, chooses: bool, plan: Any) -> Tensor:
        """Scores of all keys: those that a plan has, once they are compared, else the reference's."""
        want, scored = references.scores(index, chooses)
        if plan is None:
            return want
        found: Tensor = plan.scores
        _require_unwritten("scores", found, ~scored)
        self._compare_scores("scores", found, want, scored)
        return found

    def _inside(self, references: References, index: LogitsInputs, blocks: Blocks, plan: Any) -> Tensor:
        """Likewise of the keys in candidate blocks."""
        want = references.inside(index, blocks.chosen)
        if plan is None:
            return want
        found: Tensor = plan.candidates.compact
        seen = want > -torch.inf
        _require_equal("keys that are seen in candidate blocks", (found != -torch.inf).long(), seen.long())
        self._compare_scores("candidates.compact", found, want, seen)
        return found

    def _compare_scores(self, what: str, found: Tensor, want: Tensor, scored: Tensor) -> None:
        if self.case.contents is Contents.INTEGER:
            wrong = scored & (found != want)
        else:
            largest = want.masked_fill(~scored, 0.0).abs().amax(1, keepdim=True).float()
            error = score_error(found.dtype, self.case.short_sums)
            wrong = scored & ~((found.float() - want.float()).abs() <= largest * error)
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            values = f"{float(found[row, column]):.9g}, expected {float(want[row, column]):.9g}"
            raise WrongResultError(f"{what}[{row}, {column}] = {values}; {int(wrong.sum())} differ")


def _compare_blocks(level: Any, want: Blocks) -> None:
    """WrongResultError where candidate blocks are not the best by the scores of all keys."""
    _require_equal("candidates.block_counts", level.block_counts[:, None].long(), want.counts[:, None].long())
    _require_unwritten("candidates.block_scores", level.block_scores, ~want.scored)
    wrong = want.scored & (level.block_scores != want.scores)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise WrongResultError(f"candidates.block_scores[{row}, {column}]: is not the largest of its keys' scores")
    _require_equal("candidates.blocks", level.blocks.long(), want.chosen)
    _require_equal("candidates.pages", level.pages.long(), want.pages)


def _require_unwritten(what: str, found: Tensor, unwritten: Tensor) -> None:
    integer, poison = _INTEGERS[found.dtype]
    stray = unwritten & (found.view(integer) != poison)
    if bool(stray.any()):
        row, column = stray.nonzero()[0].tolist()
        raise WrongResultError(f"{what}[{row}, {column}]: was written, and nothing should score it")


def selecting_arguments(layer: Layer, kv_table: Tensor | None) -> dict[str, Any]:
    """What a layer selects by, under the names of its arguments."""
    assert layer.index is not None, "the layer selects"
    names = ("index_q", "index_cache", "weights", "context_lens", "block_table")
    found: dict[str, Any] = dict(zip(names, layer.index.tensors, strict=True))
    given = {"index_q_scales": layer.index.q_scales, "kv_block_table": kv_table, "candidates": _MODES[layer.selects]}
    return {**found, **{name: value for name, value in given.items() if value is not None}}


def layer_arguments(layer: Layer) -> dict[str, Tensor]:
    """The caches of a layer under the names of their arguments."""
    nothing = torch.empty(0)
    selected = Source(layer.record, layer.caches, nothing)
    if layer.window is None:
        return cache_arguments(selected)
    return {**cache_arguments(layer.window), **cache_arguments(selected, "extra_"), "indices": layer.window.indices}


def _bits(plan: Any, outputs: list[DecodeOutputs]) -> list[Tensor]:
    """What a step wrote, to be compared to the bit."""
    blocks = [] if plan.candidates is None else [plan.candidates.blocks, plan.candidates.pages]
    return [plan.ids, plan.counts, *blocks, *(bits for output in outputs for bits in output.bits())]


def _require_equal(what: str, found: Tensor, want: Tensor) -> None:
    if not torch.equal(found, want):
        row, column = (found != want).nonzero()[0].tolist()
        count = int((found != want).sum())
        raise WrongResultError(
            f"{what}: [{row}, {column}] = {int(found[row, column])}, expected {int(want[row, column])}; {count} differ"
        )
