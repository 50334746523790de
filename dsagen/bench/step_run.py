"""Measuring decode steps: what was selected and attended to is verified, then the whole and its stages are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsagen
from dsagen.arch import arch_for_capability
from dsagen.bench.figures import CaseKey, PeerFigure, case_key, figures_of
from dsagen.bench.run import PEER_GATES
from dsagen.bench.step_data import (
    CHOOSE,
    USE,
    StepBenchCase,
    StepBenchInputs,
    StepResult,
    make_pools,
    step_cases,
    step_inputs,
)
from dsagen.bench.step_figures import StepFigures, step_floor_us
from dsagen.bench.step_peers import STEP_PEERS, StepPeer
from dsagen.bench.step_verify import Promise, step_problem
from dsagen.bench.timing import Call, eager_cost_us, graph_time_us, input_sets_for
from dsagen.check.scores_run import has_short_sums
from dsagen.check.step_run import score_error
from dsagen.errors import CheckFailed
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.matrix import expand
from dsagen.spec import DeploymentSpec

# Requests that the pools have room for.
POOL_REQUESTS = 128
# Sets of small steps that are kept at most; those of one request then read 290 MB in turn.
MOST_SETS = 16
# Peers sum products of e4m3 operands in fewer bits than fp32 has.
_PEER_PROMISE = Promise(score_error(torch.float32, short_sums=True), False, PEER_GATES, "e", float("inf"))


def sweep_steps(
    spec: DeploymentSpec,
    *,
    with_peers: bool,
    seed: int,
    records: Mapping[CaseKey, float],
    progress: Callable[[str], None],
    wrong: Callable[[str], None],
) -> list[StepFigures]:
    """Every case of the spec on the current device.

    What is wrong with a step of ours goes to `wrong`, and it is not timed. A peer that is missing, refuses or is wrong
    becomes a note.
    """
    kernels = dsagen.load(spec)
    kernels.prepare()
    cases = step_cases(spec)
    pools = make_pools(cases[0], POOL_REQUESTS, device=kernels.device, with_bf16=with_peers)
    figures: list[StepFigures] = []
    for case in cases:
        inputs = step_inputs(case, pools, input_sets_for(case.read_bytes, most=MOST_SETS), seed=seed)
        try:
            found = measure_step(kernels, case, inputs)
        except CheckFailed as error:
            wrong(str(error))
            continue
        progress(f"{spec.name}: {found.title}: {found.gpu_us:.1f} us")
        peers = tuple(measure_step_peer(peer, spec, case, inputs) for peer in STEP_PEERS) if with_peers else ()
        figures.append(replace(found, peers=peers, record_us=records.get(case_key(case.to_json()))))
    return figures


def measure_step(kernels: Any, case: StepBenchCase, inputs: Sequence[StepBenchInputs]) -> StepFigures:
    """Verify the step of the first input set, then time all. CheckFailed for a wrong one."""
    properties = torch.cuda.get_device_properties(kernels.device)
    arch = arch_for_capability(properties.major, properties.minor)
    # A plan belongs to one stream: some for the graphs', some for the current stream.
    graph_plans, eager_plans = (plans_of(kernels, case, inputs) for _ in range(2))
    eager = step_calls(kernels, case, eager_plans, inputs)
    result = result_of(case, eager_plans[0], eager[0]())
    problem = step_problem(kernels.spec, case, inputs[0], result, our_promise(kernels.spec, arch.name))
    if problem:
        raise CheckFailed(f"{kernels.spec.name}: {case}: {problem}; it was not timed")
    timing = graph_time_us(step_calls(kernels, case, graph_plans, inputs))
    overlapping_us = None
    if kernels.can_overlap:
        overlapping = plans_of(kernels, case, inputs, overlap=True)
        overlapping_us = graph_time_us(step_calls(kernels, case, overlapping, inputs)).median_us
    # By itself a stage has no predecessor that it could overlap but its own last run.
    apart = plans_of(kernels, case, inputs, overlap=False)
    apart_us = graph_time_us(step_calls(kernels, case, apart, inputs)).median_us
    uncounted_us = None
    if case.selects is None and graph_plans[0].selection.counted is not None:
        plain = [
            plans_of(kernels, case, inputs, histogram=False, overlap=overlap)
            for overlap in (kernels.can_overlap, False)
        ]
        overlapped, one_by_one = (graph_time_us(step_calls(kernels, case, plans, inputs)).median_us for plans in plain)
        uncounted_us = overlapped, one_by_one
    stage_us = []
    for calls in stage_calls(kernels, case, apart, inputs):
        for plan in apart:
            plan.rebind()  # each graph is captured on a stream of its own; all of the last one has ended
        stage_us.append(graph_time_us(calls).median_us)
    indexer, selection, attention = stage_us
    issue_us, wall_us = eager_cost_us(eager)
    ceilings = figures_of(properties.name, arch)
    return StepFigures(
        spec=kernels.spec.name,
        slugs=kernels.decode_step_slugs(graph_plans[0], case.selects),
        device=properties.name,
        arch=arch.name,
        case=case,
        gpu_us=timing.median_us,
        spread=timing.spread,
        input_sets=timing.sets,
        overlapping_us=overlapping_us,
        apart_us=apart_us,
        stage_us=(indexer, selection, attention),
        uncounted_us=uncounted_us,
        issue_us=issue_us,
        wall_us=wall_us,
        floor_us=None if ceilings is None else step_floor_us(case, ceilings),
    )


def plans_of(kernels: Any, case: StepBenchCase, inputs: Sequence[StepBenchInputs], **options: Any) -> list[Any]:
    """Plans for input sets: the same for all, but where blocks are used one for each, in which they are chosen."""
    if case.candidate_blocks:
        options["candidate_blocks"] = case.candidate_blocks
    sizes, k = (case.requests, case.next_n, case.context), case.selected
    if case.selects != USE:
        return [kernels.plan_decode_step(*sizes, k=k, **_window(case), **options)] * len(inputs)
    plans = [kernels.plan_decode_step(*sizes, k=k, **_window(case), **options) for _ in inputs]
    for call in step_calls(kernels, replace(case, selects=CHOOSE), plans, inputs):
        call()
    if kernels.device.type == "cuda":
        torch.cuda.synchronize(kernels.device)
    for plan in plans:
        plan.rebind()
    return plans


def result_of(case: StepBenchCase, plan: Any, returned: tuple[Tensor, Tensor]) -> StepResult:
    """What a step with a plan has left and returned."""
    scores = plan.candidates.compact if case.selects == USE else plan.scores
    return StepResult(scores, plan.ids, *returned, plan.candidates.blocks if case.selects else None)


def step_calls(
    kernels: Any, case: StepBenchCase, plans: Sequence[Any], inputs: Sequence[StepBenchInputs]
) -> list[Call]:
    """A step for each input set, with outputs of its own."""
    calls: list[Call] = []
    for item, plan in zip(inputs, plans, strict=True):
        options = {"plan": plan, "candidates": case.selects, **item.indexer, **_outputs(case, item, kernels.spec)}
        calls.append(partial(kernels.decode_step, item.q, **item.caches, **options))
    return calls


def stage_calls(
    kernels: Any, case: StepBenchCase, plans: Sequence[Any], inputs: Sequence[StepBenchInputs]
) -> tuple[list[Call], list[Call], list[Call]]:
    """The stages by themselves, over what the plans' last steps have left."""
    scored: list[Call] = []
    selected: list[Call] = []
    attended: list[Call] = []
    for item, plan in zip(inputs, plans, strict=True):
        given = (item.index_q, item.index_cache, item.weights, item.context_lens, item.block_table)
        into: dict[str, Any] = {"out": plan.flat_ids, "counts": plan.flat_counts, "determinism": plan.determinism}
        of_keys = partial(
            kernels.topk, plan.scores, k=case.selected, lengths=item.context_lens.view(-1),
            page_table=item.block_table, page_size=case.page_size, table_of_row=plan.row_tables,
            plan=plan.selection, **into,
        )  # fmt: skip
        level, scales = plan.candidates, {"q_scales": item.index_q_scales}
        if case.selects == USE:
            scores = partial(
                kernels.indexer_logits_candidates, *given, level.blocks, max_seq_len=case.context, **scales
            )
            scored.append(partial(scores, out=level.compact))
            selected.append(
                partial(
                    kernels.topk, level.compact, k=case.selected, page_table=level.pages, page_size=BLOCK_KEYS,
                    drop_neg_inf=True, plan=level.inside, **into,
                )
            )  # fmt: skip
        elif case.selects == CHOOSE:
            unscored = min(case.selected, BLOCK_KEYS * level.slots)
            scored.append(
                partial(
                    kernels.indexer_logits_blocks, *given, unscored_up_to=unscored, out=plan.scores,
                    block_scores=level.block_scores, block_counts=level.block_counts, **scales,
                )
            )  # fmt: skip
            of_blocks = partial(
                kernels.topk, level.block_scores, k=level.slots, lengths=level.block_counts,
                page_table=item.block_table, page_size=case.page_size // BLOCK_KEYS, table_of_row=plan.row_tables,
                determinism="order", plan=level.choosing, out=level.pages, raw=level.blocks,
            )  # fmt: skip
            selected.append(partial(_one_after_another, of_blocks, of_keys))
        else:
            options = {"unscored_up_to": case.selected, "out": plan.scores, **scales}
            scored.append(partial(kernels.indexer_logits, *given, **options))
            selected.append(of_keys)
        outputs = _outputs(case, item, kernels.spec)
        attended.append(
            partial(kernels.decode_step, item.q, **item.caches, plan=plan, reuse_ids=True, **outputs),
        )
    return scored, selected, attended


def _one_after_another(*calls: Call) -> None:
    for call in calls:
        call()


def our_promise(spec: DeploymentSpec, arch: str) -> Promise:
    """What a step of the spec's kernels for `arch` is held to."""
    dtype = torch.float32 if spec.scores == "fp32" else torch.bfloat16
    error = score_error(dtype, has_short_sums(expand(spec, (arch,))))
    return Promise(error, True, None, spec.lse.base, float(spec.lse.empty))


def measure_step_peer(
    peer: StepPeer, spec: DeploymentSpec, case: StepBenchCase, inputs: Sequence[StepBenchInputs]
) -> PeerFigure:
    """Verify and time one chain. Whatever goes wrong in it is a note, since its code is not ours."""
    reason = peer.refuses(case)
    if reason is not None:
        return PeerFigure(peer.name, peer.name, "", None, reason)
    try:
        calls, version = peer.bind(case, inputs, spec.sm_scale), peer.version
        problem = step_problem(spec, case, inputs[0], calls[0](), _PEER_PROMISE)
        if problem:
            return PeerFigure(peer.name, peer.label(case), version, None, f"wrong: {problem}")
        return PeerFigure(peer.name, peer.label(case), version, graph_time_us(calls).median_us)
    except Exception as error:
        return PeerFigure(peer.name, peer.name, "", None, f"failed: {type(error).__name__}: {error}")


def _window(case: StepBenchCase) -> dict[str, int]:
    """What a plan is told of the first cache beside a second one."""
    return {"window": case.window} if case.window else {}


def _outputs(case: StepBenchCase, item: StepBenchInputs, spec: DeploymentSpec) -> dict[str, Tensor]:
    shape = (case.requests, case.next_n, case.heads)
    lse = torch.empty(shape, dtype=torch.float32, device=item.q.device).transpose(1, 2)
    return {"out": item.q.new_empty(*shape, spec.dims.d_v), "lse": lse}
