"""Measuring sparse decode: cases checked against the fp64 reference, then timed, beside their peers if asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import dsagen
from dsagen.arch import arch_for_capability
from dsagen.bench.axes import SweepAxes
from dsagen.bench.cases import decode_cases
from dsagen.bench.data import DecodeCase, DecodeInputs, KvPool, decode_inputs, make_pool
from dsagen.bench.figures import CaseKey, DecodeFigures, PeerFigure, case_key, figures_of, floor_us
from dsagen.bench.peers import PEERS, DecodeCall, Peer
from dsagen.bench.timing import Timing, eager_cost_us, graph_time_us, input_sets_for
from dsagen.check.compare import Gates, compare_decode
from dsagen.check.probes import cache_arguments
from dsagen.errors import CheckFailed
from dsagen.families.sparse_decode.reference import DecodeReference, sparse_decode_reference
from dsagen.runtime.sparse_decode import SparseDecodePlan
from dsagen.spec import DeploymentSpec

# Query tokens of a case that are compared with the reference before it is timed.
CHECKED_ROWS = 32
# Formats without scale groups are compared in groups as wide as V32's.
GROUP_DIMS = 128
# A peer may round the cache's scales to bf16, or read bf16 copies of its rows; what it must not be is wrong.
PEER_GATES = Gates(
    out_abs=4e-3,
    out_rel=4e-2,
    out_cos=5e-5,
    group_error=2e-2,
    head_error=4e-2,
    lse_abs=4e-3,
    lse_rel=4e-3,
    lse_limit=1e-1,
)

Progress = Callable[[str], None]
Wrong = Callable[[str], None]
Records = Mapping[CaseKey, float]


def raise_wrong(problem: str) -> None:
    """What a sweep does about a wrong output unless told otherwise: CheckFailed."""
    raise CheckFailed(problem)


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs and what the first input set should give (natural-log lse)."""

    case: DecodeCase
    inputs: list[DecodeInputs]
    rows: Tensor
    expected: DecodeReference


def sweep_decode(
    specs: Sequence[DeploymentSpec],
    *,
    with_peers: bool = False,
    seed: int = 0,
    records: Records | None = None,
    progress: Progress = lambda _: None,
    wrong: Wrong = raise_wrong,
    axes: SweepAxes = SweepAxes(),  # noqa: B008
) -> list[DecodeFigures]:
    """Measure every case of specs with the op on the current device.

    `records` maps a case's key to the GPU time of its last record, `axes` gives other cases than those of the specs. A
    case whose output is wrong is not timed; what is wrong goes to `wrong`. Raises DeviceError without a device that the
    specs declare. A peer that is missing, refuses or is wrong becomes a note.
    """
    figures: list[DecodeFigures] = []
    pools = Pools(with_peers)
    for spec in sorted(specs, key=lambda spec: (spec.kv.format_id, spec.extra_kv.format_id if spec.extra_kv else "")):
        kernels = dsagen.load(spec)
        kernels.prepare()
        for case in axes.cases(decode_cases(spec)):
            progress(f"{spec.name}: batch {case.batch}, topk {case.width}")
            prepared = prepare_case(case, *pools.of(case, kernels.device), seed)
            try:
                found = _measure(kernels, prepared)
            except CheckFailed as error:
                wrong(str(error))
                continue
            peers = tuple(measure_peer(peer, prepared) for peer in PEERS) if with_peers else ()
            figures.append(with_context(found, peers, records or {}))
    return figures


class Pools:
    """The pools of the case at hand: with a bf16 copy one takes 15 GB, so that others are given up first."""

    def __init__(self, with_bf16: bool) -> None:
        self._with_bf16 = with_bf16
        self._made: dict[str, KvPool] = {}

    def of(self, case: DecodeCase, device: torch.device) -> tuple[KvPool, KvPool | None]:
        """The main cache's pool and the second one's, which may be the same tokens."""
        formats = [case.kv_format, *([case.extra_format] if case.extra_format else [])]
        for stale in set(self._made) - set(formats):
            del self._made[stale]
        for format_id in formats:
            if format_id not in self._made:
                made = make_pool(format_id, page_size=case.page_size, device=device, with_bf16=self._with_bf16)
                self._made[format_id] = made
        return self._made[case.kv_format], self._made[case.extra_format] if case.extra_format else None


def measure_peer(peer: Peer, prepared: Prepared) -> PeerFigure:
    """Check and time one peer. Whatever goes wrong in it is a note, since its code is not ours."""
    calls, figure = checked_peer(peer, prepared)
    if not calls:
        return figure
    try:
        return replace(figure, gpu_us=graph_time_us(calls).median_us)
    except Exception as error:
        return failed_peer(peer, error)


def checked_peer(peer: Peer, prepared: Prepared) -> tuple[list[DecodeCall], PeerFigure]:
    """A peer's calls on a case, the first of them compared with the reference, and its figure, not timed yet.

    Where it refuses, fails or is wrong there are no calls, and the figure says why.
    """
    case = prepared.case
    reason = peer.refuses(case)
    if reason is not None:
        return [], PeerFigure(peer.name, peer.name, "", None, reason)
    try:
        calls, version = peer.bind(case, prepared.inputs), peer.version
        problem = problem_of(calls[0], prepared, PEER_GATES)
    except Exception as error:
        return [], failed_peer(peer, error)
    if problem:
        return [], PeerFigure(peer.name, peer.label(case), version, None, f"wrong: {problem}")
    return calls, PeerFigure(peer.name, peer.label(case), version, None)


def failed_peer(peer: Peer, error: Exception) -> PeerFigure:
    """The figure of a peer that raised."""
    return PeerFigure(peer.name, peer.name, "", None, f"failed: {type(error).__name__}: {error}")


def prepare_case(case: DecodeCase, pool: KvPool, extra_pool: KvPool | None, seed: int) -> Prepared:
    """Inputs of a case, and what the reference makes of some of the first input set's rows."""
    sets = input_sets_for(case.kv_bytes + case.io_bytes)
    inputs = decode_inputs(case, pool, sets, seed=seed, extra_pool=extra_pool)
    first = inputs[0]
    step = max(1, case.queries // CHECKED_ROWS)
    rows = torch.arange(0, case.queries, step, device=first.q.device)
    expected = sparse_decode_reference(
        first.q, case.record, pool.caches, first.indices, sm_scale=first.sm_scale, rows=rows, extra=first.extra
    )
    return Prepared(case, inputs, rows, expected)


def _measure(kernels: Any, prepared: Prepared) -> DecodeFigures:
    checked = CheckedCalls.of(kernels, prepared)
    timing = graph_time_us(checked.captured)
    return checked.figures(timing, eager_cost_us(checked.eager))


@dataclass(frozen=True)
class CheckedCalls:
    """Our calls on a case, one list for a graph and one for the current stream; the first was right."""

    kernels: Any
    case: DecodeCase
    plan: SparseDecodePlan
    captured: list[DecodeCall]
    eager: list[DecodeCall]

    @classmethod
    def of(cls, kernels: Any, prepared: Prepared) -> CheckedCalls:
        """Plan a case and compare its first input set with the reference; CheckFailed where it is wrong."""
        case = prepared.case
        # A plan belongs to one stream: one for the graph's, one for the current stream.
        shape, extra_topk = (case.batch, case.s_q, case.topk), case.extra_topk or 0
        graph_plan, eager_plan = (kernels.plan_sparse_decode(*shape, extra_topk=extra_topk) for _ in range(2))
        eager = decode_calls(kernels, eager_plan, prepared)
        # As the conformance check judges values like these: few of many tokens bear most of the weight.
        gates = Gates().for_logits(prepared.expected.peak)
        problem = problem_of(in_natural_log(eager[0], kernels.spec), prepared, gates)
        if problem:
            raise CheckFailed(f"{kernels.spec.name}: {case}: {problem}; it was not timed")
        return cls(kernels, case, graph_plan, decode_calls(kernels, graph_plan, prepared), eager)

    def figures(self, timing: Timing, eager_us: tuple[float, float]) -> DecodeFigures:
        """What was timed of them: GPU time, and CPU and wall time of an eager call."""
        properties = torch.cuda.get_device_properties(self.kernels.device)
        ceilings = figures_of(properties.name, arch_for_capability(properties.major, properties.minor))
        return DecodeFigures(
            spec=self.kernels.spec.name,
            slug=self.plan.main_slug,
            device=properties.name,
            case=self.case,
            num_splits=self.plan.num_splits,
            ctas=self.plan.partition.main_ctas,
            launches=1 if self.plan.partition.one_launch else 2,
            gpu_us=timing.median_us,
            spread=timing.spread,
            input_sets=timing.sets,
            issue_us=eager_us[0],
            wall_us=eager_us[1],
            floor_us=floor_us(self.case, ceilings) if ceilings is not None else None,
        )


def decode_calls(kernels: Any, plan: SparseDecodePlan, prepared: Prepared) -> list[DecodeCall]:
    """One call for each input set, with outputs of its own."""
    case = prepared.case
    calls: list[DecodeCall] = []
    for item in prepared.inputs:
        out = item.q.new_empty(case.batch, case.s_q, case.heads, case.record.d_v)
        lse = torch.empty(case.batch, case.s_q, case.heads, dtype=torch.float32, device=item.q.device).transpose(1, 2)
        calls.append(
            functools.partial(
                kernels.sparse_decode,
                item.q,
                item.k_cache,
                item.indices,
                plan=plan,
                softmax_scale=item.sm_scale,
                out=out,
                lse=lse,
                **_other_caches(item),
            )
        )
    return calls


def _other_caches(item: DecodeInputs) -> dict[str, Tensor]:
    """The arguments of a call that not every format and spec has."""
    found = {} if item.kpe_cache is None else {"kpe_cache": item.kpe_cache}
    if item.extra is None:
        return found
    return {**found, **cache_arguments(item.extra, "extra_"), "extra_indices": item.extra.indices}


def in_natural_log(call: DecodeCall, spec: DeploymentSpec) -> DecodeCall:
    """The call with its lse in base e, whatever the spec's base."""

    def decode() -> tuple[Tensor, Tensor | None]:
        out, lse = call()
        return out, lse * math.log(2) if lse is not None and spec.lse.base == 2 else lse

    return decode


def problem_of(call: DecodeCall, prepared: Prepared, gates: Gates) -> str:
    """What is wrong with a call's outputs, compared on the checked rows; empty when nothing is."""
    case, want = prepared.case, prepared.expected
    out, lse = call()
    got_out = out.reshape(case.queries, case.heads, -1)[prepared.rows]
    got_lse = want.lse if lse is None else lse.transpose(1, 2).reshape(case.queries, case.heads)[prepared.rows]
    group_dims = case.record.scale_group_dims or GROUP_DIMS
    return compare_decode(got_out, got_lse, want.out, want.lse, group_dims, gates).problem


def with_context(found: DecodeFigures, peers: tuple[PeerFigure, ...], records: Records) -> DecodeFigures:
    """The figures beside their peers and their last record."""
    return replace(found, peers=peers, record_us=records.get(case_key(found.case.to_json())))
