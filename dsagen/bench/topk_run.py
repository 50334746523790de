"""Measuring top-k: every result that is timed is also verified, ours and the peers'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import dsagen
from dsagen.arch import arch_for_capability
from dsagen.bench.cases import topk_cases
from dsagen.bench.figures import CaseKey, PeerFigure, case_key, figures_of
from dsagen.bench.timing import Timing, eager_cost_us, graph_time_us, input_sets_for
from dsagen.bench.topk_data import TORCH_SCORES, TopkBenchCase, TopkBenchInputs, logical_ids, topk_inputs
from dsagen.bench.topk_figures import TopkFigures, topk_floor_us
from dsagen.bench.topk_peers import TOPK_PEERS, TopkCall, TopkPeer
from dsagen.bench.topk_verify import promise_problem, selection_problem
from dsagen.check.topk_calls import offered_modes, topk_calls
from dsagen.errors import CheckFailed
from dsagen.spec import DeploymentSpec

# Small problems keep fewer sets than it takes to leave the cache: the scorer has just written them.
MOST_SETS = 24
Problem = str


class _Kept:
    """A call whose result stays for verification; what ran eagerly is wiped, so that only a replay's ids pass."""

    def __init__(self, call: TopkCall) -> None:
        self._call = call
        self.result: Tensor | None = None

    def __call__(self) -> Tensor:
        self.result = self._call()
        if not torch.cuda.is_current_stream_capturing():
            self.result.fill_(-1)
        return self.result


def sweep_topk(
    spec: DeploymentSpec,
    *,
    with_peers: bool,
    seed: int,
    records: Mapping[CaseKey, float],
    progress: Callable[[str], None],
    wrong: Callable[[str], None],
) -> list[TopkFigures]:
    """Every case of the spec in both dtypes of scores, on the current device.

    What is wrong with a result of ours goes to `wrong`, and its case is left out. A peer that is missing, refuses or is
    wrong becomes a note.
    """
    figures: list[TopkFigures] = []
    peers: dict[CaseKey, tuple[PeerFigure, ...]] = {}
    # The spec's own dtype first.
    for score in sorted(TORCH_SCORES, key=lambda name: name != spec.scores):
        kernels = dsagen.load(spec if spec.scores == score else spec.replace(scores=score))
        kernels.prepare()
        for case in topk_cases(spec, score, offered_modes(kernels.topk)):
            inputs = topk_inputs(case, _sets_of(case), device=kernels.device, seed=seed)
            try:
                found = measure_topk(kernels, case, inputs)
            except CheckFailed as error:
                wrong(str(error))
                continue
            progress(f"{spec.name}: {found.title}: {found.gpu_us:.1f} us")
            # What others do does not depend on our mode.
            shape = case_key(asdict(replace(case, mode="off")))
            if with_peers and shape not in peers:
                peers[shape] = tuple(measure_topk_peer(peer, case, inputs) for peer in TOPK_PEERS)
            record_us = records.get(case_key(asdict(case)))
            figures.append(replace(found, spec=spec.name, peers=peers.get(shape, ()), record_us=record_us))
    return [replace(found, off_us=_off_us(found, figures)) for found in figures]


def measure_topk(kernels: Any, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> TopkFigures:
    """Time one case. CheckFailed when any of the timed results is wrong."""
    calls, slugs = _our_calls(kernels, case, inputs)
    timing, problem = timed_and_verified(case, inputs, calls, paged=True, promised=True)
    if problem:
        raise CheckFailed(f"{kernels.spec.name}: {case}: {problem}")
    # A plan belongs to one stream: the graph's had its own.
    issue_us, wall_us = eager_cost_us(_our_calls(kernels, case, inputs)[0])
    properties = torch.cuda.get_device_properties(kernels.device)
    arch = arch_for_capability(properties.major, properties.minor)
    ceilings = figures_of(properties.name, arch)
    return TopkFigures(
        spec=kernels.spec.name,
        slugs=slugs,
        device=properties.name,
        arch=arch.name,
        case=case,
        gpu_us=timing.median_us,
        spread=timing.spread,
        input_sets=timing.sets,
        issue_us=issue_us,
        wall_us=wall_us,
        floor_us=None if ceilings is None else topk_floor_us(case, ceilings),
    )


def measure_topk_peer(peer: TopkPeer, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]) -> PeerFigure:
    """Time and verify one peer. Whatever goes wrong in it is a note, since its code is not ours."""
    reason = peer.refuses(case)
    if reason is not None:
        return PeerFigure(peer.name, peer.name, "", None, reason)
    try:
        calls, version = peer.bind(case, inputs), peer.version
        timing, problem = timed_and_verified(case, inputs, calls, paged=peer.paged(case), promised=False)
    except Exception as error:
        return PeerFigure(peer.name, peer.name, "", None, f"failed: {type(error).__name__}: {error}")
    gpu_us = None if problem else timing.median_us
    return PeerFigure(peer.name, peer.name, version, gpu_us, f"wrong: {problem}" if problem else "")


def timed_and_verified(
    case: TopkBenchCase,
    inputs: Sequence[TopkBenchInputs],
    calls: Sequence[TopkCall],
    *,
    paged: bool,
    promised: bool,
) -> tuple[Timing, Problem]:
    """GPU time of the calls, and what is wrong with the results that the last replay left; empty when nothing is.

    `paged` says that results are ids of the page table, `promised` that they keep the case's mode.
    """
    kept = [_Kept(call) for call in calls]
    timing = graph_time_us(kept)
    torch.cuda.synchronize()
    for number, (item, call) in enumerate(zip(inputs, kept, strict=True)):
        assert call.result is not None, "graph_time_us ran every call"
        indices = logical_ids(case, item, call.result) if paged else call.result
        problem = selection_problem(case, item.scores, indices)
        # Sorting takes longer than everything else together.
        if not problem and promised and number == 0:
            problem = promise_problem(case, item.scores, indices)
        if problem:
            return timing, f"input set {number}: {problem}"
    return timing, ""


def _our_calls(
    kernels: Any, case: TopkBenchCase, inputs: Sequence[TopkBenchInputs]
) -> tuple[list[TopkCall], tuple[str, ...]]:
    """One call for each input set, with outputs of its own, and the names of the kernels that the calls take."""
    run = topk_calls(kernels, case.rows, case.width, case.k, case.mode)
    calls: list[TopkCall] = []
    for item in inputs:
        out = torch.full((case.rows, case.k), -1, dtype=torch.int32, device=item.scores.device)
        options = {"lengths": item.lengths, "page_table": item.page_table, "page_size": case.page_size, "out": out}
        calls.append(functools.partial(run, item.scores, **options))
    return calls, tuple(dict.fromkeys(slug for item in inputs for slug in run.slugs(item.scores)))


def _sets_of(case: TopkBenchCase) -> int:
    return input_sets_for(case.read_bytes + case.write_bytes, most=MOST_SETS)


def _off_us(found: TopkFigures, figures: Sequence[TopkFigures]) -> float | None:
    """The time of the same shape in mode `off`."""
    wanted = replace(found.case, mode="off")
    return next((other.gpu_us for other in figures if other.case == wanted), None)
