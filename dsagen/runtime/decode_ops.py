"""The methods of loaded kernels that attend over the cache rows of index lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dsagen.errors import FrozenError, GuardError
from dsagen.families.sparse_decode.choice import Candidate, candidates, choose, first_fitting, judge_choice
from dsagen.families.sparse_decode.choice_table import ChoiceTables, Decision
from dsagen.families.sparse_decode.op import WORKSPACE_ALIGNMENT_BYTES, DecodeShape
from dsagen.guard import require_int
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.runtime import traced
from dsagen.runtime.decode_lists import check_index_values
from dsagen.runtime.decode_outputs import make_outputs
from dsagen.runtime.device_memory import new_output
from dsagen.runtime.launch import OpRoutes, Step, launch_config
from dsagen.runtime.op_methods import OpMethods
from dsagen.runtime.plan_cache import PlanCache, PlanKey
from dsagen.runtime.sparse_decode import (
    OP,
    DecodeBinder,
    DecodeTensors,
    SparseDecodePlan,
    require_scale,
)

if TYPE_CHECKING:
    from dsagen.runtime.api import Device
    from dsagen.runtime.device_kernels import DeviceKernels
    from dsagen.runtime.driver import DeviceFacts


class DecodeOps(OpMethods):
    """sparse_decode and its plans, over what `Kernels` provides."""

    _binder: DecodeBinder
    _poisons: bool
    # What calls without a plan share, and how those that were checked before find it.
    _plans: PlanCache[PlanKey, SparseDecodePlan]
    _decode_routes: OpRoutes
    # The choice tables as they were at the load, and hashes of texts that rows were compared with, by slug.
    _tables: ChoiceTables
    _texts: dict[str, str]
    # Launches of a call that DSAGEN_SPARSE_DECODE_LAUNCHES asks for.
    _launches: int | None
    # Whether there is room for a cluster, by the kernel's slug, CTAs, and the device.
    _fitting: dict[tuple[str, int, int], bool]

    def sparse_decode_workspace_bytes(
        self,
        batch: int,
        s_q: int,
        topk: int,
        *,
        extra_topk: int = 0,
        num_splits: int | None = None,
        device: Device | None = None,
    ) -> int:
        """Bytes of the workspace that a plan of that shape needs; 0 where rows are not split. Allocates nothing."""
        self._require_op(OP)
        kernels = self._on(self._ordinal(device))
        shape = self._shape(batch, s_q, topk, extra_topk)
        return choose(self._judge(kernels, shape, num_splits)).partition.workspace_bytes

    def plan_sparse_decode(
        self,
        batch: int,
        s_q: int,
        topk: int,
        *,
        extra_topk: int = 0,
        num_splits: int | None = None,
        workspace: torch.Tensor | None = None,
        device: Device | None = None,
    ) -> SparseDecodePlan:
        """A plan for calls with q [batch, s_q, heads, d_qk], indices [batch, s_q, topk] and, unless `extra_topk` is 0,
        extra_indices [batch, s_q, extra_topk].

        `num_splits` overrides the spec's mode. `workspace` is uint8 memory of at least `sparse_decode_workspace_bytes`,
        which must serve no other plan at the same time; without it the plan allocates its own. Loads kernels that are
        not loaded yet. FrozenError during graph capture.
        """
        kernels, chosen, shape = self._plan_parts((batch, s_q, topk, extra_topk), num_splits, device)
        return self._make_plan(kernels, shape, chosen, workspace)

    def _decode_plans(
        self,
        sizes: tuple[int, int, int, int],
        num_splits: int | None,
        workspace: torch.Tensor,
        ordinal: int,
        overlaps: bool,
    ) -> tuple[SparseDecodePlan, SparseDecodePlan]:
        """Plans over one workspace: of calls by themselves, and of those right behind what makes their lists.

        The two are one where launches are not to overlap.
        """
        kernels, chosen, shape = self._plan_parts(sizes, num_splits, ordinal)
        plan = self._make_plan(kernels, shape, chosen, workspace)
        form = kernels.dependent(chosen.plan) if overlaps else None
        return plan, plan if form is None else self._make_plan(kernels, shape, chosen, workspace, form)

    def _plan_parts(
        self, sizes: tuple[int, int, int, int], num_splits: int | None, device: Device | None
    ) -> tuple[DeviceKernels, Candidate, DecodeShape]:
        """What a plan of that shape is made of; FrozenError during graph capture."""
        batch, s_q, topk, extra_topk = sizes
        self._require_op(OP)
        kernels = self._on(self._ordinal(device))
        if self._driver.is_capturing(kernels.ordinal):
            raise FrozenError(
                f"sparse_decode: no plan for batch {batch}, s_q {s_q}, topk {topk}"
                f"{f' + {extra_topk}' if extra_topk else ''} exists, and making one during CUDA "
                "graph capture is not possible: call plan_sparse_decode before the capture and pass its plan"
            )
        shape = self._shape(batch, s_q, topk, extra_topk)
        return kernels, choose(self._judge(kernels, shape, num_splits)), shape

    def main_kernels(self) -> tuple[tuple[KernelPlan, ...], DeviceFacts]:
        """The main kernels that there are on `device`, in order of preference, and what it is."""
        kernels = self._on(self._ordinal(None))
        return kernels.mains, kernels.facts

    def plan_choice(self, shape: DecodeShape, slug: str, num_splits: int, launches: int) -> SparseDecodePlan:
        """A plan with one of these main kernels, so many splits and launches, whatever tables and cost model say.

        GuardError where that does not fit the shape.
        """
        kernels, capacities = self._on(self._ordinal(None)), (self.spec.topk, self.spec.extra_topk)
        plan = next(plan for plan in kernels.mains if plan.slug == slug)
        judged = judge_choice(plan, shape, capacities, kernels.facts.sm_count, (num_splits, launches))
        return self._make_plan(kernels, shape, choose([judged]), None)

    def sparse_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        *,
        plan: SparseDecodePlan | None = None,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        extra_kpe_cache: torch.Tensor | None = None,
        v_cache: torch.Tensor | None = None,
        extra_v_cache: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of each query token over the cache rows that its index list names, on the current stream.

        - q: bf16 [batch, s_q, heads, d_qk], last dim contiguous
        - k_cache: [pages, page_size, kv_heads, columns] of the spec's KV format; pages may lie apart by any multiple of
          16 bytes, and hold the rows of several KV heads by token or by KV head
        - indices: int32 [batch, s_q, topk], page x page_size + slot; negative: no token. Ids at or past the pool are
          masked; with DSAGEN_CHECK_INDICES they are an error, at the price of waiting for the device. With several KV
          heads [batch, s_q, kv_heads, topk] is a list for each, [batch, s_q, topk] one for all of them
        - topk_length: int32 [batch] or [batch, s_q], live columns of each row; bounded to 0..topk (checked likewise);
          [batch, s_q, kv_heads] with several KV heads
        - attn_sink: fp32 [heads], natural-log logits of a sink without value
        - extra_k_cache, extra_indices [batch, s_q, extra_topk], extra_topk_length: a second cache in the same softmax,
          of the spec's extra_kv, with pages, list and lengths of its own; a call may leave it out
        - kpe_cache, extra_kpe_cache: the rotary dims of formats that keep them in a tensor of their own
        - v_cache, extra_v_cache: the values of formats whose keys are all that k_cache holds
        - softmax_scale: the model's by default
        - out, lse: destinations, allocated where not given

        Returns out bf16 [batch, s_q, heads, d_v] and lse fp32 [batch, heads, s_q] in the spec's base, without the
        sink. A row without tokens gives 0 and the spec's empty lse. Calls without `plan` share plans per shape and
        stream; during CUDA graph capture they need one from an earlier call of that shape on that stream, so better
        pass one. Raises GuardError for tensors that do not fit, FrozenError for what would have to be made during
        capture, DeviceError when the driver refuses.
        """
        if torch.compiler.is_compiling():
            if plan is not None:
                self._require_own(plan)
            given = {
                "topk_length": topk_length,
                "attn_sink": attn_sink,
                "softmax_scale": softmax_scale,
                "extra_k_cache": extra_k_cache,
                "extra_indices": extra_indices,
                "extra_topk_length": extra_topk_length,
                "kpe_cache": kpe_cache,
                "extra_kpe_cache": extra_kpe_cache,
                "v_cache": v_cache,
                "extra_v_cache": extra_v_cache,
            }
            d_v = self.spec.dims.d_v
            return traced.sparse_decode(self.handle, plan, (q, k_cache, indices), out, lse, d_v, **given)
        # Written out, for a call of an engine ends here, and all that is done before it costs every call.
        repeated = False
        if plan is None:
            repeated = self._decode_routes.repeat(
                q,
                k_cache,
                indices,
                topk_length,
                attn_sink,
                out,
                lse,
                kpe_cache,
                extra_k_cache,
                extra_indices,
                extra_topk_length,
                extra_kpe_cache,
                v_cache,
                extra_v_cache,
                softmax_scale,
                None,
            )
        elif type(plan) is SparseDecodePlan and plan.spec is self.spec and not self._checks_values:
            repeated = plan.repeat(
                q,
                k_cache,
                indices,
                topk_length,
                attn_sink,
                out,
                lse,
                kpe_cache,
                extra_k_cache,
                extra_indices,
                extra_topk_length,
                extra_kpe_cache,
                v_cache,
                extra_v_cache,
                softmax_scale,
            )
        if repeated is not False:
            return (out, lse) if repeated is True else repeated  # type: ignore[return-value]
        others = (kpe_cache, extra_k_cache, extra_indices, extra_topk_length, extra_kpe_cache, v_cache, extra_v_cache)
        tensors = DecodeTensors(q, k_cache, indices, topk_length, attn_sink, out, lse, *others)
        return self._decode(tensors, plan, softmax_scale)

    def decode_with_shared_plan(
        self,
        tensors: DecodeTensors,
        softmax_scale: float | None,
        num_splits: int | None = None,
        *,
        may_plan_in_capture: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As sparse_decode with the plan that calls of this shape and split count share on the current stream.

        With `may_plan_in_capture` a captured call that finds none has one of its own, in memory of the graph's pool.
        """
        repeated = self._decode_routes.repeat(*tensors, softmax_scale, num_splits)
        if repeated is True:
            return _results(tensors)
        return repeated or self._decode(tensors, None, softmax_scale, num_splits, may_plan_in_capture)

    @property
    def decode_repeater(self) -> Callable[..., Any] | None:
        """As OpRoutes.repeat of calls without a plan and their split count; None where each has to be checked."""
        routes = self._decode_routes
        return None if routes.table is None else routes.repeat

    def _decode(
        self,
        tensors: DecodeTensors,
        plan: SparseDecodePlan | None,
        softmax_scale: float | None,
        num_splits: int | None = None,
        may_plan_in_capture: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A call that has to be checked first."""
        self._require_op(OP)
        shares = plan is None
        binding = self._binder.bind(tensors)
        if softmax_scale is not None:
            require_scale(softmax_scale)
        ordinal = self._home_of(tensors.q)
        stream = self._driver.current_stream(ordinal)
        rows = binding.batch * binding.s_q
        if plan is None:
            if rows == 0:
                return _results(make_outputs(tensors, self.spec.dims.d_v))
            shape = (binding.batch, binding.s_q, binding.topk, binding.extra_topk)
            plan = self._shared_plan(may_plan_in_capture, PlanKey(*shape, ordinal, stream, num_splits))
        else:
            self._require_own(plan)
            plan.require_shape(binding)
            plan.require_apart(tensors, binding)
        if self._checks_values and rows:
            self._refuse_capture(ordinal)
            check_index_values(tensors)
        bound = make_outputs(tensors, self.spec.dims.d_v)
        if rows:
            plan.launch(binding.arguments, bound, tensors, softmax_scale, stream)
            # In a capture the plan may be the graph's own.
            if shares and self._decode_routes.table is not None and not self._driver.is_capturing(ordinal):
                plan.serve(self._decode_routes, (*tensors, softmax_scale, num_splits))
        return _results(bound)

    def _shared_plan(self, may_plan_in_capture: bool, key: PlanKey) -> SparseDecodePlan:
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                if self._driver.is_capturing(key.ordinal):
                    self._plans.pin(key)
            elif may_plan_in_capture and self._driver.is_capturing(key.ordinal):
                plan = self._plan_in_capture(key)
            else:
                shape, splits = (key.batch, key.s_q, key.topk), key.num_splits
                plan = self.plan_sparse_decode(*shape, extra_topk=key.extra_topk, num_splits=splits, device=key.ordinal)
                self._plans.add(key, plan)
            return plan

    def _plan_in_capture(self, key: PlanKey) -> SparseDecodePlan:
        """A plan for one call of a graph. What comes after it in the graph may have its memory again."""
        kernels, device = self._on(key.ordinal), self._driver.torch_device(key.ordinal)
        shape = self._shape(key.batch, key.s_q, key.topk, key.extra_topk)
        chosen = choose(self._judge(kernels, shape, key.num_splits))
        size = chosen.partition.workspace_bytes
        workspace = None
        if size:
            memory = new_output("workspace", (size + WORKSPACE_ALIGNMENT_BYTES,), torch.uint8, device)
            first = -memory.data_ptr() % WORKSPACE_ALIGNMENT_BYTES
            workspace = memory[first : first + size]
        return self._make_plan(kernels, shape, chosen, workspace)

    def _make_plan(
        self,
        kernels: DeviceKernels,
        shape: DecodeShape,
        chosen: Candidate,
        workspace: torch.Tensor | None,
        form: KernelPlan | None = None,
    ) -> SparseDecodePlan:
        """`form` is the dependent form of the chosen main kernel, where the plan is to launch that."""
        main = self._loader.load(form or chosen.plan, kernels.ordinal)
        combine = self._loader.load(kernels.combine, kernels.ordinal) if chosen.partition.combine_ctas else None
        return SparseDecodePlan(
            self.spec,
            self._driver,
            (shape.batch, shape.s_q, shape.topk, shape.extra_topk),
            chosen.partition,
            main,
            combine,
            workspace,
            self._debug_sync,
            self._poisons,
        )

    def _require_own(self, plan: SparseDecodePlan) -> None:
        if not isinstance(plan, SparseDecodePlan) or plan.spec is not self.spec:
            raise GuardError("[T-09] plan: was not made by these kernels: pass what their plan_sparse_decode returned")

    def _shape(self, batch: int, s_q: int, topk: int, extra_topk: int) -> DecodeShape:
        if require_int("extra_topk", extra_topk) > 0 and self.spec.extra_kv is None:
            raise GuardError(f"[T-17] extra_topk: {extra_topk}: the spec declares no extra_kv: leave it out")
        rows = require_int("batch", batch), require_int("s_q", s_q)
        return DecodeShape(*rows, self.spec.heads, require_int("topk", topk), extra_topk, self.spec.kv_heads)

    def _judge(self, kernels: DeviceKernels, shape: DecodeShape, num_splits: int | None) -> tuple[Candidate, ...]:
        spec, sm_count = self.spec, kernels.facts.sm_count
        given = (
            shape,
            (spec.topk, spec.extra_topk),
            sm_count,
            spec.determinism,
            num_splits,
            self._decide(kernels, shape),
        )
        judged = candidates(kernels.mains, *given, self._launches)
        chosen = first_fitting(judged)
        # Of a table or the knob a cluster that does not fit is an error; the cost model can do without.
        asked = self._launches is not None or (chosen is not None and chosen.row is not None)
        if chosen is None or asked or not chosen.partition.one_launch or self._fits_cluster(kernels, chosen):
            return judged
        return candidates(kernels.mains, *given, 2)

    def _fits_cluster(self, kernels: DeviceKernels, chosen: Candidate) -> bool:
        """Whether this process may use enough multiprocessors of the device for the cluster of a choice."""
        key = chosen.plan.slug, chosen.partition.cluster, kernels.ordinal
        if key not in self._fitting:
            step = Step(
                self._loader.load(chosen.plan, kernels.ordinal), chosen.partition.cluster, chosen.partition.cluster
            )
            config = launch_config(step, 0)
            self._fitting[key] = self._driver.most_clusters(kernels.ordinal, step.kernel.handle, config) > 0
        return self._fitting[key]

    def _decide(self, kernels: DeviceKernels, shape: DecodeShape) -> Decision:
        """What the choice tables say of a shape on a device."""
        device = kernels.facts.name
        return self._tables.decide(shape, kernels.mains, device, self._text_of, self.spec.determinism)

    def _text_of(self, plan: KernelPlan) -> str:
        """Hash of a kernel's text without comments."""
        found = self._texts.get(plan.slug)
        if found is None:
            found = self._texts[plan.slug] = render(plan).evidence_hash
        return found


def _results(tensors: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    assert tensors.out is not None and tensors.lse is not None
    return tensors.out, tensors.lse
