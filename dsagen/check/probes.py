"""Running one case on a device: the call, the ways of calling it, and what is compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dsagen.check.cases import REPEATS, ROUGH_VALUES, DecodeCase, Probe, Values
from dsagen.check.compare import DecodeComparison, Gates, compare_decode
from dsagen.check.inputs import DecodeInputs, make_inputs
from dsagen.check.outputs import DecodeOutputs, GuardedTensor
from dsagen.errors import DsagenError
from dsagen.families.sparse_decode.reference import DecodeReference, Source, sparse_decode_reference
from dsagen.spec import DeploymentSpec

_REPLAYS = 3
_DEFAULT_GROUP_DIMS = 128


class WrongResultError(DsagenError):
    """A case gave a wrong result; the text says which."""


class NotRunError(DsagenError):
    """A case could not be run here; the text says why."""


class DecodeKernels(Protocol):
    """What a check needs of loaded kernels; `dsagen.load` gives it."""

    @property
    def spec(self) -> DeploymentSpec: ...  # noqa: D102
    def prepare(self) -> None: ...  # noqa: D102
    def sparse_decode_workspace_bytes(  # noqa: D102
        self, batch: int, s_q: int, topk: int, *, extra_topk: int, num_splits: int | None
    ) -> int: ...
    def plan_sparse_decode(  # noqa: D102
        self, batch: int, s_q: int, topk: int, *, extra_topk: int, num_splits: int | None, workspace: Tensor | None
    ) -> Any: ...
    def sparse_decode(  # noqa: D102
        self,
        q: Tensor,
        k_cache: Tensor,
        indices: Tensor,
        *,
        plan: Any,
        topk_length: Tensor | None,
        attn_sink: Tensor | None,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
        **caches: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Call:
    """Kernels with a plan and its guarded workspace, for calls of one shape on one stream."""

    kernels: DecodeKernels
    plan: Any
    workspace: GuardedTensor | None

    @classmethod
    def of(cls, kernels: DecodeKernels, case: DecodeCase, device: torch.device, batch: int | None = None) -> Call:
        """A plan for the case's shape, or for another batch."""
        shape = (case.batch if batch is None else batch, case.s_q, case.topk)
        wanted: dict[str, Any] = {"extra_topk": case.extra_topk, "num_splits": case.num_splits}
        size_bytes = kernels.sparse_decode_workspace_bytes(*shape, **wanted)
        workspace = GuardedTensor.workspace(size_bytes, device) if size_bytes else None
        given = None if workspace is None else workspace.view
        plan = kernels.plan_sparse_decode(*shape, **wanted, workspace=given)
        return cls(kernels, plan, workspace)

    @property
    def slugs(self) -> tuple[str, ...]:
        """Names of the kernels that it launches, none where the plan does not tell."""
        return tuple(getattr(self.plan, "slugs", ()))

    def __call__(self, inputs: DecodeInputs, outputs: DecodeOutputs) -> None:
        """Run the op on the current stream."""
        out, lse = self.kernels.sparse_decode(
            inputs.q,
            cache_arguments(inputs.sources[0])["k_cache"],
            inputs.indices,
            plan=self.plan,
            topk_length=inputs.topk_length,
            attn_sink=inputs.attn_sink,
            softmax_scale=inputs.sm_scale,
            out=outputs.out.view,
            lse=outputs.lse,
            **other_arguments(inputs),
        )
        if out.data_ptr() != outputs.out.view.data_ptr() or lse.data_ptr() != outputs.lse.data_ptr():
            raise WrongResultError("the op did not return the outputs that it was given")

    def require_guards_intact(self, outputs: DecodeOutputs) -> None:
        """WrongResultError when something was written outside the outputs or the workspace. Poisons all of them."""
        zones = {"out": outputs.out, "lse": outputs.lse_rows, "workspace": self.workspace}
        for name, zone in zones.items():
            if zone is not None and (count := zone.written_outside()):
                raise WrongResultError(f"{name}: {count} elements outside of it were written")


@dataclass(frozen=True)
class CaseRun:
    """One case on one device. `kernels` loads the kernels that the case needs; `seed` decides every draw.

    `launched` gets the names of the kernels that the case launches.
    """

    case: DecodeCase
    kernels: Callable[[DecodeCase], DecodeKernels]
    device: torch.device
    seed: int
    launched: set[str] = field(default_factory=set)

    def run(self) -> DecodeComparison:
        """Run and compare. WrongResultError for a wrong result, NotRunError for want of memory or devices."""
        kernels = self.kernels(self.case)
        self.require_memory(kernels.spec)
        return _PROBES[self.case.probe](self, kernels)

    def call(self, kernels: DecodeKernels, case: DecodeCase | None = None, batch: int | None = None) -> Call:
        """A call with a plan of its own: of the case's shape, of another's, or of another batch."""
        call = Call.of(kernels, case or self.case, self.device, batch)
        self.launched.update(call.slugs)
        return call

    def inputs(self, kernels: DecodeKernels, variation: int = 0) -> DecodeInputs:
        """The inputs of the case, or others of the same shapes."""
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {self.case.name} {variation}".encode()))
        spec = kernels.spec
        heads = (spec.heads, spec.kv_heads)
        return make_inputs(self.case, spec.kv_format, heads, self.device, generator, spec.extra_kv_format)

    def outputs(self, kernels: DecodeKernels, batch: int | None = None) -> DecodeOutputs:
        """Fresh poisoned outputs."""
        batch = self.case.batch if batch is None else batch
        spec = kernels.spec
        return DecodeOutputs.make(batch, self.case.s_q, spec.heads, spec.dims.d_v, self.device, self.case.strided)

    def compare(self, kernels: DecodeKernels, inputs: DecodeInputs, outputs: DecodeOutputs) -> DecodeComparison:
        """Outputs against the reference."""
        rows = None
        if self.case.sample_rows:
            # Evenly spread, the first and the last row included.
            rows = torch.linspace(0, self.case.rows - 1, self.case.sample_rows, device=self.device).round().long()
        rough = self.case.values in ROUGH_VALUES
        want = reference_of(kernels.spec, inputs, rows, with_spread=rough)
        out, lse = outputs.rows()
        if rows is not None:
            out, lse = out[rows], lse[rows]
        gates = gates_for(self.case.values, want.peak)
        group_dims = inputs.record.scale_group_dims or _DEFAULT_GROUP_DIMS
        return compare_decode(out, lse, want.out, want.lse, group_dims, gates, want.spread)

    def require_memory(self, spec: DeploymentSpec) -> None:
        """NotRunError when the device lacks the memory that the case is reckoned to need."""
        if self.device.type != "cuda":
            return
        record, case = spec.kv_format, self.case
        outputs_bytes = case.rows * spec.heads * 2 * (3 * spec.dims.d_v + 3 * record.d_qk)
        partial_bytes = case.rows * spec.heads * 4 * spec.dims.d_v * (case.num_splits or 1)
        pool_bytes = case.batch * (case.kv_tokens + case.page_size) * record.record_bytes
        if case.extra is not None and spec.extra_kv_format is not None:
            tokens = case.extra.kv_tokens + case.extra.page_size
            pool_bytes += case.batch * tokens * spec.extra_kv_format.record_bytes
        pool_bytes *= spec.kv_heads
        needed_bytes = outputs_bytes + partial_bytes + 2 * pool_bytes + (8 << 30)
        torch.cuda.empty_cache() if needed_bytes > 32 << 30 else None
        free_bytes = torch.cuda.mem_get_info(self.device)[0]
        free_bytes += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if needed_bytes > free_bytes:
            raise NotRunError(f"needs about {needed_bytes >> 30} GiB, the device has {free_bytes >> 30} GiB free")


def cache_arguments(source: Source, prefix: str = "") -> dict[str, Tensor]:
    """A cache's tensors under the names of their arguments."""
    assert isinstance(source.caches, Mapping)
    rows, *second = source.record.tensors
    names = {f"{prefix}k_cache": rows.name, **{f"{prefix}{tensor.name}": tensor.name for tensor in second}}
    return {argument: source.caches[name] for argument, name in names.items()}


def other_arguments(inputs: DecodeInputs) -> dict[str, Tensor | None]:
    """The arguments of a call that not every format and spec has."""
    main, *extra = inputs.sources
    found: dict[str, Tensor | None] = {k: v for k, v in cache_arguments(main).items() if k != "k_cache"}
    for source in extra:
        found |= cache_arguments(source, "extra_")
        found |= {"extra_indices": source.indices, "extra_topk_length": source.topk_length}
    return found


def gates_for(values: Values, peak: float) -> Gates:
    """FlashMLA's gates as they are for values like those of its tests, and what fp32 logits allow for larger ones."""
    if values is Values.NORMAL:
        return Gates()
    return Gates().for_peak(peak) if values in ROUGH_VALUES else Gates().for_logits(peak)


def reference_of(
    spec: DeploymentSpec, inputs: DecodeInputs, rows: Tensor | None = None, *, with_spread: bool = False
) -> DecodeReference:
    """The exact result for some or all query tokens, in the spec's conventions."""
    return sparse_decode_reference(
        inputs.q,
        inputs.record,
        inputs.caches,
        inputs.indices,
        sm_scale=inputs.sm_scale,
        topk_length=inputs.topk_length,
        attn_sink=inputs.attn_sink,
        lse_base=spec.lse.base,
        empty_lse=float(spec.lse.empty),
        rows=rows,
        extra=inputs.extra,
        with_spread=with_spread,
    )


def _plain(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    call = run.call(kernels)
    call(inputs, outputs)
    comparison = run.compare(kernels, inputs, outputs)
    call.require_guards_intact(outputs)
    return comparison


def _repeated(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    call = run.call(kernels)
    call(inputs, outputs)
    first = outputs.bits()
    comparison = run.compare(kernels, inputs, outputs)
    for repeat in range(1, REPEATS):
        call.require_guards_intact(outputs)
        call(inputs, outputs)
        _require_same_bits(first, outputs.bits(), f"run {repeat + 1} of {REPEATS}")
    return comparison


def _batch_invariant(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    case = run.case
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    run.call(kernels, case)(inputs, outputs)
    comparison = run.compare(kernels, inputs, outputs)
    out_bits, lse_bits = outputs.bits()
    for size in (1, case.batch - 2):
        call = run.call(kernels, case, batch=size)
        for first in range(0, case.batch - size + 1, size):
            part = slice(first, first + size)
            alone = run.outputs(kernels, batch=size)
            call(inputs.part(part), alone)
            what = f"requests {first}..{first + size - 1} in a batch of {size} instead of {case.batch}"
            _require_same_bits((out_bits[part], lse_bits[part]), alone.bits(), what)
    return comparison


def _graph(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    _require_cuda(run)
    kernels.prepare()
    inputs, outputs = run.inputs(kernels), run.outputs(kernels)
    call = run.call(kernels)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(run.device)
    with torch.cuda.graph(graph):
        call(inputs, outputs)
    for replay in range(_REPLAYS):
        if replay:
            inputs.overwrite(run.inputs(kernels, variation=replay))
        outputs.out.poison_again()
        outputs.lse_rows.poison_again()
        graph.replay()
        comparison = run.compare(kernels, inputs, outputs)
        if not comparison.passed:
            raise WrongResultError(f"replay {replay + 1}: {comparison.problem}")
        call.require_guards_intact(outputs)
    return comparison


def _side_stream(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    _require_cuda(run)
    stream = torch.cuda.Stream(run.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(run.device))
    with torch.cuda.stream(stream):
        inputs, outputs = run.inputs(kernels), run.outputs(kernels)
        call = run.call(kernels)
        # Work in front of the op, so that a launch on the wrong stream would read what is not written yet.
        late = run.inputs(kernels, variation=1)
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        inputs.overwrite(late)
        call(inputs, outputs)
        comparison = run.compare(kernels, inputs, outputs)
        call.require_guards_intact(outputs)
    torch.cuda.current_stream(run.device).wait_stream(stream)
    return comparison


def _other_device(run: CaseRun, kernels: DecodeKernels) -> DecodeComparison:
    _require_cuda(run)
    others = [index for index in range(torch.cuda.device_count()) if index != run.device.index]
    if not others:
        raise NotRunError("needs a second CUDA device")
    with torch.cuda.device(others[0]):
        comparison = _plain(run, kernels)
        if torch.cuda.current_device() != others[0]:
            raise WrongResultError("the op changed the current device")
    return comparison


def _require_cuda(run: CaseRun) -> None:
    if run.device.type != "cuda":
        raise NotRunError("needs a CUDA device")


def _require_same_bits(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], what: str) -> None:
    for name, a, b in zip(("out", "lse"), first, second, strict=True):
        if not torch.equal(a, b):
            different = a != b
            place = tuple(int(i) for i in different.nonzero()[0])
            raise WrongResultError(f"{what}: {name} differs in {int(different.sum())} elements, the first at {place}")


_PROBES: Mapping[Probe, Callable[[CaseRun, DecodeKernels], DecodeComparison]] = {
    Probe.PLAIN: _plain,
    Probe.REPEATED: _repeated,
    Probe.GRAPH: _graph,
    Probe.SIDE_STREAM: _side_stream,
    Probe.OTHER_DEVICE: _other_device,
    Probe.BATCH_INVARIANT: _batch_invariant,
}
