"""The methods of loaded kernels that select the largest scores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dsagen.errors import FrozenError, GuardError
from dsagen.families.topk.geometry import CLUSTER_SIZES
from dsagen.families.topk.guards import ROWS_GUARD, WIDTH_GUARD
from dsagen.families.topk.op import Candidate, Clusters, TopkShape, candidates, choose, most_lead
from dsagen.guard import check, rename, require_bool, require_int
from dsagen.plan import KernelPlan
from dsagen.quantity import quantity
from dsagen.runtime import traced
from dsagen.runtime.launch import OpLaunches, OpRoutes, Step, launch_config
from dsagen.runtime.op_methods import OpMethods
from dsagen.runtime.plan_cache import PlanCache
from dsagen.runtime.topk import (
    OP,
    TopkOptions,
    TopkTensors,
    bind,
    check_tables,
    check_windows,
    make_output,
    output_arguments,
    require_determinism,
    shape_of,
    table_and_page_size,
)
from dsagen.runtime.topk_plan import TopkPlan

if TYPE_CHECKING:
    from dsagen.runtime.api import Device


# Shapes remembered; a serving process has a handful.
_MAX_CHOICES = 256


class TopkOps(OpMethods):
    """topk, its plans and what tells of them, over what `Kernels` provides."""

    _topk_launches: OpLaunches
    _topk_routes: OpRoutes
    # What calls without a plan share, by rows, width, k, device and stream.
    _topk_plans: PlanCache[tuple[int, int, int, int, int], TopkPlan]
    # What `choose` has said, by device and shape.
    _topk_choices: dict[tuple[int, TopkShape], Candidate]
    # Clusters that devices hold at once, by their ordinals, and the size that DSAGEN_TOPK_CLUSTER asks for.
    _topk_clusters: dict[int, Clusters]
    _topk_cluster: int | None

    def topk(
        self,
        scores: torch.Tensor,
        *,
        k: int,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        page_size: int | None = None,
        table_of_row: torch.Tensor | None = None,
        table_starts: torch.Tensor | None = None,
        candidate_blocks: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        drop_neg_inf: bool = False,
        determinism: str = "set",
        plan: TopkPlan | None = None,
        out: torch.Tensor | None = None,
        raw: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Indices of the k largest scores of each row, exactly, then -1, on the current stream.

        - scores: [rows, width] of the spec's dtype, last dim contiguous, rows anywhere
        - lengths, starts: int32 [rows], the window of each row; indices count from its start. A window is bounded to
          its row, a negative length is 0; with DSAGEN_CHECK_INDICES windows that leave the row are an error, and so
          are tables and offsets that have no id for some element of a window (a negative page is padding)
        - page_table: int32 [rows, pages], or [tables, pages] with table_of_row; an index becomes
          page_table[table, table_start + index // page_size] x page_size + index % page_size
        - page_size (1 by default), table_of_row and table_starts (int32 [rows]) go with page_table
        - candidate_blocks: int32 [rows, blocks], in place of page_table: a table with pages of 8
        - offsets: int32 [rows], added to each id
        - drop_neg_inf: select only what exceeds -inf
        - determinism: "set" selects the same indices at every call, "order" also writes them in ascending order, so
          that the result is the same to the bit; "off" asks for neither, and gets what "set" does
        - plan: of plan_topk, for this shape, where the call is captured in a CUDA graph or runs beside others
        - out: int32 [rows, k], allocated where not given; raw: int32 [rows, k], gets the indices before any
          transform; counts: int32 [rows], gets how many were selected

        NaN is the lowest score, -0 equals +0, among equals the lower index wins. Ids that the tables cannot give are
        -1. Returns out. Raises GuardError for what does not fit, FrozenError when the kernel would have to be loaded
        during capture or after freeze(), DeviceError when the driver refuses.
        """
        if torch.compiler.is_compiling():
            if plan is not None:
                self._require_own_topk(plan)
                if scores.dim() == 2:  # else the op itself refuses them
                    plan.require_shape(scores.shape[0], scores.shape[1], k, scores.device)
            given = {
                "lengths": lengths,
                "starts": starts,
                "page_table": page_table,
                "page_size": page_size,
                "table_of_row": table_of_row,
                "table_starts": table_starts,
                "candidate_blocks": candidate_blocks,
                "offsets": offsets,
                "drop_neg_inf": drop_neg_inf,
                "determinism": determinism,
            }
            return traced.topk(self.handle, scores, k, out, raw, counts, **given)
        scalars = (k, page_size, drop_neg_inf, determinism, candidate_blocks is not None)
        if not self._checks_values and (page_table is None or candidate_blocks is None):
            table = page_table if candidate_blocks is None else candidate_blocks
            call = (scores, lengths, starts, table, table_of_row, table_starts, offsets, out, raw, counts, *scalars)
            repeated = self._repeat_topk(plan, call)
            if repeated is not False:
                return out if repeated is True else repeated[0]  # type: ignore[return-value]
        self._require_op(OP)
        with_table = table_of_row is not None or table_starts is not None
        table, tokens = table_and_page_size(page_table, candidate_blocks, page_size, with_table)
        tensors = TopkTensors(scores, lengths, starts, table, table_of_row, table_starts, offsets, out, raw, counts)
        ordered = require_determinism(determinism)
        name = "page_table" if candidate_blocks is None else "candidate_blocks"
        options = TopkOptions(require_int("k", k), tokens, require_bool("drop_neg_inf", drop_neg_inf), ordered, name)
        arguments, ordinal = self._bind_topk(tensors, options, plan)
        rows, shares = int(scores.shape[0]), plan is None
        result = make_output(tensors, k)
        if rows:
            stream = self._driver.current_stream(ordinal)
            chosen = self._choose_topk(ordinal, shape_of(tensors, k, self.spec))
            launches, held = self._topk_launches if plan is None else plan.launches, {}
            if chosen.split is not None:
                plan = plan or self._shared_topk_plan((rows, int(scores.shape[1]), k), ordinal, stream)
                plan.claim(stream)
                launches, held = plan.launches, plan.arguments()
            kernels = self._topk_kernels(ordinal, chosen, plan is not None and plan.is_dependent)
            steps = [Step(self._loader.load(kernel, ordinal), chosen.ctas, chosen.cluster) for kernel in kernels]
            values = {**arguments, **output_arguments(tensors, result), **held, "row_step": chosen.ctas}
            self._launch_topk(launches, steps, stream, values, plan, (tensors, result, scalars))
            # A captured call has a plan that it shares with none but those of its graph.
            if shares and plan is not None and not self._driver.is_capturing(ordinal):
                plan.serve(self._topk_routes, (*tensors, *scalars))
        return result

    def _bind_topk(
        self, tensors: TopkTensors, options: TopkOptions, plan: TopkPlan | None
    ) -> tuple[dict[str, Any], int]:
        """Arguments of a checked call but for the outputs' addresses, and its device."""
        arguments = bind(tensors, options, self.spec, self._driver)
        ordinal = self._home_of(tensors.scores)
        if self._checks_values:
            self._refuse_capture(ordinal)
            check_windows(tensors)
            check_tables(tensors, options)
        if plan is not None:
            rows, width = (int(size) for size in tensors.scores.shape)
            self._require_own_topk(plan)
            plan.require_shape(rows, width, options.k, tensors.scores.device)
            plan.require_apart(tensors.given(options.table_name))
        return arguments, ordinal

    def _launch_topk(
        self,
        launches: OpLaunches,
        steps: list[Step],
        stream: int,
        values: dict[str, Any],
        plan: TopkPlan | None,
        call: tuple[TopkTensors, torch.Tensor, tuple[Any, ...]],
    ) -> None:
        """Launch the kernels of a call: its tensors as given, its result and its scalars."""
        tensors, result, scalars = call
        bound = tensors._replace(out=result)
        operands = (*bound, None if plan is None else plan.workspace)
        try:
            launches.launch(steps, stream, values, operands, (*bound, *scalars), (*tensors, *scalars))
        except BaseException:
            if plan is not None:
                plan.spoil()
            raise

    def _repeat_topk(self, plan: TopkPlan | None, call: tuple[Any, ...]) -> Any:
        """As OpLaunches.repeat; False where there is no call before it that is like it, or the plan is not ours."""
        if plan is None:
            # Either the kernels share no row, or the call has a plan that it shares with others like it.
            repeated = self._topk_launches.repeat(*call)
            return self._topk_routes.repeat(*call) if repeated is False else repeated
        if type(plan) is not TopkPlan or plan.spec is not self.spec:
            return False
        try:
            return plan.repeat(*call)
        except BaseException:
            plan.spoil()
            raise

    def topk_slugs(self, scores: torch.Tensor, *, k: int, starts: torch.Tensor | None = None) -> tuple[str, ...]:
        """Names of the kernels that topk takes for these tensors, in the order of their launches; none without rows."""
        self._require_op(OP)
        tensors = TopkTensors(scores, starts=starts)
        bind(tensors, TopkOptions(require_int("k", k), 1, drop_neg_inf=False), self.spec, self._driver)
        chosen = self._choose_topk(self._ordinal(scores.device), shape_of(tensors, k, self.spec))
        return tuple(plan.slug for plan in chosen.plans) if scores.shape[0] else ()

    def topk_workspace_bytes(self, rows: int, width: int, k: int, *, device: Device | None = None) -> int:
        """Bytes of the workspace that a plan of that shape needs; 0 where no row is shared. Allocates nothing."""
        self._require_op(OP)
        return self._choose_topk(self._ordinal(device), self._topk_shape(rows, width, k)).workspace_bytes

    def plan_topk(
        self,
        rows: int,
        width: int,
        k: int,
        *,
        workspace: torch.Tensor | None = None,
        device: Device | None = None,
    ) -> TopkPlan:
        """A plan for calls of topk with scores [rows, width] and k slots: a workspace with a stable address.

        `workspace` is uint8 memory of at least `topk_workspace_bytes`, which must serve nothing else; it is set to
        zeros on the current stream. Without it the plan allocates its own. FrozenError during graph capture.
        """
        return self._make_topk_plan((rows, width, k), workspace, device, is_dependent=False)

    def _make_topk_plan(
        self,
        sizes: tuple[int, int, int],
        workspace: torch.Tensor | None,
        device: Device | None,
        is_dependent: bool,
        counts: bool = False,
        aligned: bool = False,
    ) -> TopkPlan:
        """`aligned` says that rows of all calls begin at multiples of 16 bytes."""
        rows, width, k = sizes
        self._require_op(OP)
        ordinal = self._ordinal(device)
        if self._driver.is_capturing(ordinal):
            raise FrozenError(
                f"topk: no plan for {quantity(rows, 'row')} of {width} and k {k} exists, and making one during "
                "CUDA graph capture is not possible: call plan_topk before the capture and pass its plan"
            )
        shape = self._topk_shape(rows, width, k)
        chosen = self._choose_topk(ordinal, shape)
        taken = self._choose_topk(ordinal, replace(shape, lead=0)) if aligned else chosen
        kernels = self._topk_kernels(ordinal, taken, is_dependent)
        options = workspace, self._debug_sync, is_dependent, counts
        return TopkPlan(self.spec, self._driver, ordinal, sizes, chosen.split, kernels, *options)

    def _topk_kernels(self, ordinal: int, chosen: Candidate, is_dependent: bool) -> tuple[KernelPlan, ...]:
        """Kernels of a call in the order of their launches, the first in its dependent form where that is asked for."""
        first, *rest = chosen.plans
        form = self._on(ordinal).dependent(first) if is_dependent else None
        return (form or first, *rest)

    def _topk_shape(self, rows: int, width: int, k: int) -> TopkShape:
        """The shape of a plan, with windows anywhere, so that its workspace serves every call."""
        assert self.spec.scores is not None
        sizes = require_int("rows", rows), require_int("width", width), require_int("k", k)
        for name, guard in (("rows", ROWS_GUARD), ("width", WIDTH_GUARD)):
            try:
                check([guard], {"rows": rows, "width": width})
            except GuardError as error:
                # A plan's scores are told by their sizes.
                raise rename(error, {"scores": name}) from None
        return TopkShape(*sizes, self.spec.most_selected, most_lead(self.spec.scores))

    def _choose_topk(self, ordinal: int, shape: TopkShape) -> Candidate:
        found = self._topk_choices.get((ordinal, shape))
        if found is None:
            on = self._on(ordinal)
            plans = {role: plans for (op, role), plans in on.by_role.items() if op == OP}
            options = on.facts.sm_count, self._clusters_for_topk(ordinal, shape), self._topk_cluster
            found = choose(plans, shape, *options)
            if len(self._topk_choices) >= _MAX_CHOICES:
                self._topk_choices.clear()
            self._topk_choices[ordinal, shape] = found
        return found

    def _clusters_for_topk(self, ordinal: int, shape: TopkShape) -> Clusters:
        """Clusters that the device holds at once; as many as there could be where a call takes none in any case."""
        on = self._on(ordinal)
        most = {size: on.facts.sm_count // size for size in CLUSTER_SIZES}
        plans = {role: plans for (op, role), plans in on.by_role.items() if op == OP}
        judged = candidates(plans, shape, on.facts.sm_count, most, self._topk_cluster)
        wanted = next(found for found in judged if not found.refused)
        if wanted.cluster == 1:
            return most
        if ordinal not in self._topk_clusters:
            kernel = self._loader.load(wanted.plans[0], ordinal)
            # Fewer multiprocessors than a cluster has CTAs would be a grid of none, which the driver does not take.
            steps = {size: Step(kernel, size * count, size) for size, count in most.items() if count > 0}
            self._topk_clusters[ordinal] = dict.fromkeys(CLUSTER_SIZES, 0) | {
                size: self._driver.most_clusters(ordinal, kernel.handle, launch_config(step, 0))
                for size, step in steps.items()
            }
        return self._topk_clusters[ordinal]

    def _shared_topk_plan(self, shape: tuple[int, int, int], ordinal: int, stream: int) -> TopkPlan:
        key = (*shape, ordinal, stream)
        with self._lock:
            # A graph may be replayed beside other calls, which must not find it in the same workspace; the calls of one
            # graph follow each other and may.
            capture = self._driver.capture_id(ordinal)
            plan = self._topk_plans.take(key, capture) if capture else self._topk_plans.get(key)
            if plan is None:
                plan = self.plan_topk(*shape, device=ordinal)
                self._topk_plans.add(key, plan)
            return plan

    def _require_own_topk(self, plan: TopkPlan) -> None:
        if not isinstance(plan, TopkPlan) or plan.spec is not self.spec:
            raise GuardError("[T-09] plan: was not made by these kernels: pass what their plan_topk returned")
