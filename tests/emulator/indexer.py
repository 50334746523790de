"""The indexer's logits on the emulator: a kernel as the build compiles it, on the inputs and gates of the check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from decode import Kernel
from ptx_texts import ptx_of

from dsagen.arch import arch as arch_row
from dsagen.check.block_cases import BlockCase
from dsagen.check.block_run import BlockRun
from dsagen.check.candidate_cases import CandidateCase
from dsagen.check.candidate_run import CandidateRun
from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.indexer_run import LogitsRun
from dsagen.check.probes import WrongResultError
from dsagen.check.ragged_cases import RaggedCase
from dsagen.check.ragged_run import RaggedRun
from dsagen.check.scores_run import ScoresRun
from dsagen.emulator import Memory
from dsagen.families.indexer_logits import FAMILY, hopper
from dsagen.families.indexer_logits.forms import COUNTED
from dsagen.families.indexer_logits.op import Partition, partition_of, ragged_partition
from dsagen.families.indexer_logits.reference import counts_reference, limits_reference
from dsagen.matrix import expand
from dsagen.plan import Variant
from dsagen.runtime.emulated import EmulatorDriver
from dsagen.runtime.indexer import FORM, LogitsCall, LogitsTensors, bind, out_arguments
from dsagen.runtime.indexer_blocks import FORM as BLOCKS_FORM
from dsagen.runtime.indexer_blocks import BlockTensors, bind_blocks, result_arguments
from dsagen.runtime.indexer_candidates import FORM as CANDIDATES_FORM
from dsagen.runtime.indexer_candidates import CandidateTensors, bind_candidates
from dsagen.runtime.indexer_ragged import FORM as RAGGED_FORM
from dsagen.runtime.indexer_ragged import RaggedTensors, bind_ragged
from dsagen.runtime.launch import CallForm
from dsagen.spec import DeploymentSpec, load_spec


@cache
def spec_of(arch: str, heads: int = 16, dim: int = 128, scores: str = "fp32", keys: str = "fp8") -> DeploymentSpec:
    index = {"heads": heads, "dim": dim, "keys": keys}
    return load_spec(
        {"model": "v32", "heads": 16, "archs": [arch], "ops": ["indexer_logits"], "index": index, "scores": scores}
    )


@contextmanager
def portable_bodies() -> Iterator[None]:
    """Specs get the portable bodies, whatever sums of the logits they take."""
    with pytest.MonkeyPatch.context() as patch:
        for op in ("SPARSE_DECODE", "INDEXER_LOGITS"):
            patch.setenv(f"DSAGEN_{op}_BODY", "mma_sync")
        yield


@cache
def compiled(spec: DeploymentSpec) -> Kernel:
    """The kernel of the portable body."""
    with portable_bodies():
        (plan,) = expand(spec).plans()
    return Kernel(plan, ptx_of(plan))


@cache
def ragged_spec(arch: str, heads: int = 16, dim: int = 128, scores: str = "fp32", keys: str = "fp8") -> DeploymentSpec:
    index = {"heads": heads, "dim": dim, "keys": keys, "forms": ["ragged"]}
    return spec_of(arch).replace(index=index, scores=scores)


@cache
def hopper_kernel(heads: int, dim: int = 128, scores: str = "fp32", role: str = "main", keys: str = "fp8") -> Kernel:
    """The kernel of the hopper body."""
    arch = arch_row("sm_90a")
    axes = (("keys", keys), ("dim", dim), ("heads", heads), ("score", scores), ("smem", arch.smem_class))
    plan = FAMILY.plan(Variant(FAMILY.name, role, hopper.BODY, arch.name, axes))
    return Kernel(plan, ptx_of(plan))


def after_grid(kernel: Kernel, memory: Memory, names: tuple[str, ...] | None) -> Memory:
    """Memory of a kernel whose grid before writes buffers of those names; None: all, where the kernel overlaps it."""
    if names is None:
        names = tuple(buffer.name for buffer in memory.buffers) if kernel.plan.overlaps_previous else ()
    return memory.after(*names)


def shared_values(part: Partition) -> dict[str, Any]:
    """Arguments that say how a call is shared."""
    return {"unit_tokens": part.unit_tokens, "unit_count": part.unit_count, "blocks": part.blocks}


def placed(given: Any, form: CallForm, values: dict[str, Any]) -> Memory:
    """Memory of the tensors that a call brings, in the whole of their storages; `values` come to point there."""
    memory = Memory()
    for parameter, name in form.addresses.items():
        tensor = getattr(given, str(name))
        if tensor is None:
            continue
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        address = memory.add(str(name), whole, writable=name in form.outputs, initialised=name not in form.outputs)
        values[parameter] += address - whole.data_ptr()
    return memory


def complaint(run: ScoresRun[Any, Any, Any]) -> str:
    """What the check says of a run, empty where the kernel is right."""
    try:
        run.run()
    except WrongResultError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class EmulatedIndexer:
    """A kernel with the signature of the runtime's method, on `sms` SMs: few, so that a warp has tile after tile.

    With a `page_stride_bytes` the cache's pages lie so far apart, with nothing in between. The grid before writes what
    is `written_before`, as in after_grid.
    """

    spec: DeploymentSpec
    kernel: Kernel
    seed: int = 0
    schedule: str | None = None
    sms: int = 1
    page_stride_bytes: int | None = None
    written_before: tuple[str, ...] | None = None

    def prepare(self) -> None:
        pass

    def indexer_logits(
        self,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        unscored_up_to: int,
        fill_neg_inf: bool,
        q_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = LogitsTensors(*tensors, q_scales, out)
        (_, arguments), part = self._bound(given, unscored_up_to, fill_neg_inf)
        values = {**arguments, **shared_values(part), **out_arguments(out)}
        memory = placed(given, FORM, values)
        if self.page_stride_bytes is not None:
            values |= self._spread_pages(given.k_cache, memory)
        memory = after_grid(self.kernel, memory, self.written_before)
        self.kernel.launch(part.blocks, values, memory, self.seed, self.schedule)
        return out

    def _bound(self, given: LogitsTensors, unscored_up_to: int, fills: bool) -> tuple[LogitsCall, Partition]:
        driver = EmulatorDriver(arch_row(self.spec.archs[0]))
        call = bind(given, None, unscored_up_to, fills, self.spec, driver)
        return call, partition_of(self.kernel.plan, call.shape, self.sms)

    def _spread_pages(self, pool: torch.Tensor, memory: Memory) -> dict[str, int]:
        assert self.page_stride_bytes is not None
        base = 1 << 40
        for number in range(len(pool)):
            page = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())[number * pool.stride(0) :]
            page = page[: pool[number].numel()]
            memory.add(f"page {number}", page, writable=False, address=base + number * self.page_stride_bytes)
        return {"k_cache": base, "page_stride_bytes": self.page_stride_bytes}


@dataclass(frozen=True)
class EmulatedCounts(EmulatedIndexer):
    """As EmulatedIndexer, of a kernel that counts scores: WrongResultError where it counts others than it writes.

    Histograms begin as `before`, as if a selection had left something.
    """

    before: int = 0

    def indexer_logits(
        self,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        unscored_up_to: int,
        fill_neg_inf: bool,
        q_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = LogitsTensors(*tensors, q_scales, out)
        (shape, arguments), part = self._bound(given, unscored_up_to, fill_neg_inf)
        histograms = torch.full((shape.tokens, 1 << self.kernel.plan.constant("kDigitBits")), self.before).int()
        values = {**arguments, **shared_values(part), **out_arguments(out), "histograms": 0}
        memory = placed(given, FORM, values)
        values["histograms"] = memory.add("histograms", histograms)
        memory = after_grid(self.kernel, memory, self.written_before)
        self.kernel.launch(part.blocks, values, memory, self.seed, self.schedule)
        limits = limits_reference(given.context_lens, shape.batch, shape.next_n, int(arguments["most_keys"]))
        wrong = histograms - self.before != counts_reference(out, limits.flatten(), unscored_up_to)
        if bool(wrong.any()):
            row, digit = wrong.nonzero()[0].tolist()
            raise WrongResultError(
                f"histograms[{row}, {digit}] = {int(histograms[row, digit])}; {int(wrong.sum())} differ"
            )
        return out


@cache
def counted_kernel(
    body: str, arch: str = "sm_90a", heads: int = 16, dim: int = 128, scores: str = "fp32", keys: str = "fp8"
) -> Kernel:
    """The kernel of a body that counts scores."""
    of_hopper = (("heads", heads),) if body == hopper.BODY else ()
    axes = (("keys", keys), ("dim", dim), *of_hopper, ("score", scores), ("smem", arch_row(arch).smem_class))
    plan = FAMILY.plan(Variant(FAMILY.name, COUNTED, body, arch, axes))
    return Kernel(plan, ptx_of(plan))


def scores_of(case: LogitsCase, indexer: EmulatedIndexer) -> torch.Tensor:
    """What a call of the case gives, bits of it, and what it leaves in place."""
    run = LogitsRun(case, lambda _: indexer, torch.device("cpu"), 7)
    outputs = run.outputs(indexer)
    run.call(indexer, run.inputs(indexer), outputs.view)
    return outputs.view.contiguous().view(torch.int32)


@dataclass(frozen=True)
class EmulatedRagged:
    """As EmulatedIndexer, of keys in one piece. With a `key_stride_bytes` they lie so far apart, nothing in between."""

    spec: DeploymentSpec
    kernel: Kernel
    seed: int = 0
    schedule: str | None = None
    sms: int = 1
    key_stride_bytes: int | None = None
    written_before: tuple[str, ...] | None = None

    def prepare(self) -> None:
        pass

    def indexer_logits_ragged(
        self,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        max_window: int | None,
        unscored_up_to: int,
        fill_neg_inf: bool,
        q_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = RaggedTensors(*tensors, q_scales, out)
        driver = EmulatorDriver(arch_row(self.spec.archs[0]))
        shape, _, arguments = bind_ragged(given, max_window, unscored_up_to, fill_neg_inf, self.spec, driver)
        part = ragged_partition(self.kernel.plan, shape, self.sms)
        values = {**arguments, **shared_values(part), **out_arguments(out)}
        memory = placed(given if self.key_stride_bytes is None else given._replace(keys=None), RAGGED_FORM, values)
        if self.key_stride_bytes is not None:
            base = 1 << 40
            for number, key in enumerate(given.keys.view(torch.uint8)):
                memory.add(f"key {number}", key, writable=False, address=base + number * self.key_stride_bytes)
            values |= {"keys": base, "key_stride_bytes": self.key_stride_bytes}
        memory = after_grid(self.kernel, memory, self.written_before)
        self.kernel.launch(part.blocks, values, memory, self.seed, self.schedule)
        return out


@cache
def blocks_spec(arch: str, dim: int = 128, scores: str = "fp32", keys: str = "fp8", heads: int = 16) -> DeploymentSpec:
    index = {"heads": heads, "dim": dim, "keys": keys, "forms": ["blocks"]}
    return spec_of(arch).replace(index=index, scores=scores)


@dataclass(frozen=True)
class EmulatedBlocks:
    """As EmulatedIndexer, with scores of candidate blocks."""

    spec: DeploymentSpec
    kernel: Kernel
    seed: int = 0
    schedule: str | None = None
    sms: int = 1
    written_before: tuple[str, ...] | None = None

    def prepare(self) -> None:
        pass

    def indexer_logits_blocks(
        self,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        block_scores: torch.Tensor,
        block_counts: torch.Tensor,
        unscored_up_to: int,
        fill_neg_inf: bool,
        q_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        given = BlockTensors(*tensors, q_scales, out, block_scores, block_counts)
        driver = EmulatorDriver(arch_row(self.spec.archs[0]))
        shape, arguments = bind_blocks(given, None, unscored_up_to, fill_neg_inf, self.spec, driver)
        part = partition_of(self.kernel.plan, shape, self.sms)
        values = {**arguments, **shared_values(part), **result_arguments(given)}
        memory = after_grid(self.kernel, placed(given, BLOCKS_FORM, values), self.written_before)
        self.kernel.launch(part.blocks, values, memory, self.seed, self.schedule)
        return out, block_scores, block_counts


def blocks_problem(case: BlockCase, indexer: EmulatedBlocks) -> str:
    """As complaint, of a case."""
    return complaint(BlockRun(case, lambda _: indexer, torch.device("cpu"), 7))


@cache
def candidates_spec(arch: str, dim: int = 128, scores: str = "fp32", keys: str = "fp8") -> DeploymentSpec:
    index = {"heads": 16, "dim": dim, "keys": keys, "forms": ["candidates"]}
    return spec_of(arch).replace(index=index, scores=scores)


@dataclass(frozen=True)
class EmulatedCandidates:
    """As EmulatedIndexer, of keys in candidate blocks."""

    spec: DeploymentSpec
    kernel: Kernel
    seed: int = 0
    schedule: str | None = None
    sms: int = 1

    def prepare(self) -> None:
        pass

    def indexer_logits_candidates(
        self, *tensors: torch.Tensor, block_size: int, out: torch.Tensor, q_scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = CandidateTensors(*tensors, q_scales, out)
        driver = EmulatorDriver(arch_row(self.spec.archs[0]))
        shape, arguments = bind_candidates(given, block_size, None, self.spec, driver)
        part = partition_of(self.kernel.plan, shape, self.sms)
        values = {**arguments, **shared_values(part), **out_arguments(out)}
        memory = placed(given, CANDIDATES_FORM, values)
        self.kernel.launch(part.blocks, values, memory, self.seed, self.schedule)
        return out


def candidates_problem(case: CandidateCase, indexer: EmulatedCandidates) -> str:
    """As complaint, of a case."""
    return complaint(CandidateRun(case, lambda _: indexer, torch.device("cpu"), 7))


def ragged_problem(case: RaggedCase, indexer: EmulatedRagged) -> str:
    """As complaint, of a case."""
    return complaint(RaggedRun(case, lambda _: indexer, torch.device("cpu"), 7))


def problem(case: LogitsCase, indexer: EmulatedIndexer) -> str:
    """As complaint, of a case."""
    return complaint(LogitsRun(case, lambda _: indexer, torch.device("cpu"), 7))
