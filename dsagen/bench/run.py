"""Measuring sparse decode: cases checked against the fp64 reference, then timed, beside their peers if asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from dsagen.bench.timing import eager_cost_us, graph_time_us, input_sets_for
from dsagen.check.compare import Gates, compare_decode
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
Records = Mapping[CaseKey, float]


@dataclass(frozen=True)
class _Prepared:
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
    axes: SweepAxes = SweepAxes(),  # noqa: B008
) -> list[DecodeFigures]:
    """Measure every case of specs with the op on the current device.

    `records` maps a case's key to the GPU time of its last record, `axes` gives other cases than those of the specs.
    Raises DeviceError without a device that the specs declare, SpecError for a KV format without benchmark data,
    CheckFailed when an output is wrong. A peer that is missing, refuses or is wrong becomes a note.
    """
    figures: list[DecodeFigures] = []
    pool: KvPool | None = None
    pool_format = ""
    # One pool at a time: with a bf16 copy it takes 15 GB.
    for spec in sorted(specs, key=lambda spec: spec.kv.format_id):
        kernels = dsagen.load(spec)
        kernels.prepare()
        cases = axes.cases(decode_cases(spec))
        if pool is None or pool_format != spec.kv.format_id:
            pool = None
            pool_format = spec.kv.format_id
            pool = make_pool(pool_format, page_size=cases[0].page_size, device=kernels.device, with_bf16=with_peers)
        for case in cases:
            progress(f"{spec.name}: batch {case.batch}")
            prepared = _prepare(case, pool, seed)
            found = _measure(kernels, prepared)
            peers = tuple(measure_peer(peer, prepared) for peer in PEERS) if with_peers else ()
            figures.append(_with_context(found, peers, records or {}))
    return figures


def measure_peer(peer: Peer, prepared: _Prepared) -> PeerFigure:
    """Check and time one peer. Whatever goes wrong in it is a note, since its code is not ours."""
    case = prepared.case
    reason = peer.refuses(case)
    if reason is not None:
        return PeerFigure(peer.name, peer.name, "", None, reason)
    try:
        calls, version = peer.bind(case, prepared.inputs), peer.version
        problem = _problem(calls[0], prepared, PEER_GATES)
        if problem:
            return PeerFigure(peer.name, peer.label(case), version, None, f"wrong: {problem}")
        return PeerFigure(peer.name, peer.label(case), version, graph_time_us(calls).median_us)
    except Exception as error:
        return PeerFigure(peer.name, peer.name, "", None, f"failed: {type(error).__name__}: {error}")


def _prepare(case: DecodeCase, pool: KvPool, seed: int) -> _Prepared:
    sets = input_sets_for(case.kv_bytes + case.io_bytes)
    inputs = decode_inputs(case, pool, sets, seed=seed)
    first = inputs[0]
    step = max(1, case.queries // CHECKED_ROWS)
    rows = torch.arange(0, case.queries, step, device=first.q.device)
    expected = sparse_decode_reference(
        first.q, case.record, first.k_cache, first.indices, sm_scale=first.sm_scale, rows=rows
    )
    return _Prepared(case, inputs, rows, expected)


def _measure(kernels: Any, prepared: _Prepared) -> DecodeFigures:
    case = prepared.case
    # A plan belongs to one stream: one for the graph's, one for the current stream.
    graph_plan, eager_plan = (kernels.plan_sparse_decode(case.batch, case.s_q, case.topk) for _ in range(2))
    eager_calls = _decode_calls(kernels, eager_plan, prepared)
    problem = _problem(_in_natural_log(eager_calls[0], kernels.spec), prepared, Gates())
    if problem:
        raise CheckFailed(f"{kernels.spec.name}: {case}: {problem}; nothing was timed")
    timing = graph_time_us(_decode_calls(kernels, graph_plan, prepared))
    issue_us, wall_us = eager_cost_us(eager_calls)
    properties = torch.cuda.get_device_properties(kernels.device)
    ceilings = figures_of(properties.name, arch_for_capability(properties.major, properties.minor))
    return DecodeFigures(
        spec=kernels.spec.name,
        slug=graph_plan.main_slug,
        device=properties.name,
        case=case,
        num_splits=graph_plan.num_splits,
        ctas=graph_plan.partition.main_ctas,
        gpu_us=timing.median_us,
        spread=timing.spread,
        input_sets=timing.sets,
        issue_us=issue_us,
        wall_us=wall_us,
        floor_us=floor_us(case, ceilings) if ceilings is not None else None,
    )


def _decode_calls(kernels: Any, plan: SparseDecodePlan, prepared: _Prepared) -> list[DecodeCall]:
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
            )
        )
    return calls


def _in_natural_log(call: DecodeCall, spec: DeploymentSpec) -> DecodeCall:
    """The call with its lse in base e, whatever the spec's base."""

    def decode() -> tuple[Tensor, Tensor | None]:
        out, lse = call()
        return out, lse * math.log(2) if lse is not None and spec.lse.base == 2 else lse

    return decode


def _problem(call: DecodeCall, prepared: _Prepared, gates: Gates) -> str:
    """What is wrong with a call's outputs, compared on the checked rows; empty when nothing is."""
    case, want = prepared.case, prepared.expected
    out, lse = call()
    got_out = out.reshape(case.queries, case.heads, -1)[prepared.rows]
    got_lse = want.lse if lse is None else lse.transpose(1, 2).reshape(case.queries, case.heads)[prepared.rows]
    group_dims = case.record.scale_group_dims or GROUP_DIMS
    return compare_decode(got_out, got_lse, want.out, want.lse, group_dims, gates).problem


def _with_context(found: DecodeFigures, peers: tuple[PeerFigure, ...], records: Records) -> DecodeFigures:
    return replace(found, peers=peers, record_us=records.get(case_key(asdict(found.case))))
