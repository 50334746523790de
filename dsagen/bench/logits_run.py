"""Measuring the indexer's logits: of every result that is timed some rows are also verified, ours and the peers'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import dsagen
from dsagen.arch import DeviceFigures, arch_for_capability
from dsagen.bench.cases import logits_cases
from dsagen.bench.figures import CaseKey, PeerFigure, case_key, figures_of
from dsagen.bench.logits_data import LogitsBenchCase, LogitsBenchInputs, logits_inputs
from dsagen.bench.logits_figures import LogitsFigures
from dsagen.bench.logits_peers import LOGITS_PEERS, LogitsCall, LogitsPeer
from dsagen.bench.timing import Timing, eager_cost_us, graph_time_us, input_sets_for
from dsagen.check.indexer_cases import Contents
from dsagen.check.scores_run import SHORT_SUM_ERRORS, SUM_ERROR, differs_more, has_short_sums, magnitudes_of_codes
from dsagen.errors import CheckFailed
from dsagen.families.indexer_logits.reference import logits_reference, ragged_reference
from dsagen.matrix import expand
from dsagen.spec import DeploymentSpec

MOST_SETS = 24
# Requests, or tokens of a ragged call, that are compared with the reference.
VERIFIED = 4
# Peers sum products of e4m3 operands in fewer bits than fp32 has; the codes that are drawn have every magnitude.
_SHORT_ERROR = SHORT_SUM_ERRORS[Contents.LARGE]


class _Kept:
    """A call whose result stays for verification; what ran eagerly is wiped, so that only a replay's scores pass."""

    def __init__(self, call: LogitsCall) -> None:
        self._call = call
        self.result: Tensor | None = None

    def __call__(self) -> Tensor:
        self.result = self._call()
        if not torch.cuda.is_current_stream_capturing():
            self.result.fill_(torch.nan)
        return self.result


def sweep_logits(
    spec: DeploymentSpec,
    *,
    with_peers: bool,
    seed: int,
    records: Mapping[CaseKey, float],
    progress: Callable[[str], None],
    wrong: Callable[[str], None],
) -> list[LogitsFigures]:
    """Every case of the spec's forms of keys, on the current device.

    What is wrong with a result of ours goes to `wrong`, and its case is left out. A peer that is missing, refuses or is
    wrong becomes a note.
    """
    figures: list[LogitsFigures] = []
    kernels_by_heads: dict[int, Any] = {}
    for case in logits_cases(spec):
        if case.heads not in kernels_by_heads:
            index = {**spec.to_mapping()["index"], "heads": case.heads}
            kernels_by_heads[case.heads] = dsagen.load(spec.replace(index=index))
            kernels_by_heads[case.heads].prepare()
        kernels = kernels_by_heads[case.heads]
        sets = input_sets_for(case.read_bytes + case.write_bytes, most=MOST_SETS)
        inputs = logits_inputs(case, sets, device=kernels.device, seed=seed)
        try:
            found = measure_logits(kernels, case, inputs)
        except CheckFailed as error:
            wrong(str(error))
            continue
        progress(f"{spec.name}: {found.title}: {found.gpu_us:.1f} us")
        peers = tuple(measure_logits_peer(peer, case, inputs) for peer in LOGITS_PEERS) if with_peers else ()
        figures.append(replace(found, spec=spec.name, peers=peers, record_us=records.get(case_key(asdict(case)))))
    return figures


def measure_logits(kernels: Any, case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs]) -> LogitsFigures:
    """Time one case. CheckFailed when any of the timed results is wrong."""
    properties = torch.cuda.get_device_properties(kernels.device)
    arch = arch_for_capability(properties.major, properties.minor)
    calls = our_calls(kernels, case, inputs)
    error = _SHORT_ERROR if has_short_sums(expand(kernels.spec, (arch.name,))) else SUM_ERROR
    timing, problem = timed_and_verified(case, inputs, calls, error)
    if problem:
        raise CheckFailed(f"{kernels.spec.name}: {case}: {problem}")
    issue_us, wall_us = eager_cost_us(calls)
    ceilings = figures_of(properties.name, arch)
    return LogitsFigures(
        spec=kernels.spec.name,
        slugs=kernels.logits_slugs(case.form),
        device=properties.name,
        arch=arch.name,
        case=case,
        gpu_us=timing.median_us,
        spread=timing.spread,
        input_sets=timing.sets,
        issue_us=issue_us,
        wall_us=wall_us,
        floor_us=None if ceilings is None else logits_floor_us(case, ceilings),
    )


def measure_logits_peer(peer: LogitsPeer, case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs]) -> PeerFigure:
    """Time and verify one peer. Whatever goes wrong in it is a note, since its code is not ours."""
    reason = peer.refuses(case)
    if reason is not None:
        return PeerFigure(peer.name, peer.name, "", None, reason)
    try:
        calls, version = peer.bind(case, inputs), peer.version
        timing, problem = timed_and_verified(case, inputs, calls, _SHORT_ERROR)
    except Exception as error:
        return PeerFigure(peer.name, peer.name, "", None, f"failed: {type(error).__name__}: {error}")
    gpu_us = None if problem else timing.median_us
    return PeerFigure(peer.name, peer.name, version, gpu_us, f"wrong: {problem}" if problem else "")


def timed_and_verified(
    case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs], calls: Sequence[LogitsCall], error: float
) -> tuple[Timing, str]:
    """GPU time of the calls, and what is wrong with the results that the last replay left; empty when nothing is."""
    kept = [_Kept(call) for call in calls]
    timing = graph_time_us(kept)
    torch.cuda.synchronize()
    for number, (item, call) in enumerate(zip(inputs, kept, strict=True)):
        assert call.result is not None, "graph_time_us ran every call"
        problem = scores_problem(case, item, call.result, error)
        if problem:
            return timing, f"input set {number}: {problem}"
    return timing, ""


def scores_problem(case: LogitsBenchCase, item: LogitsBenchInputs, scores: Tensor, error: float) -> str:
    """What is wrong with scores [tokens, columns] inside of windows, of some requests or tokens; empty when nothing."""
    count = case.batch if case.form == "paged" else case.next_n
    for number in range(0, count, max(1, count // VERIFIED)):
        rows = (
            slice(number * case.next_n, (number + 1) * case.next_n)
            if case.form == "paged"
            else slice(number, number + 1)
        )
        want, scored, size = _expected(case, item, number)
        found = scores[rows, : want.shape[1]]
        bad = scored & differs_more(found, want, size, error)
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            value, expected = float(found[row, column]), float(want[row, column])
            where = f"scores[{rows.start + row}, {column}]"
            return f"{where} = {value:.9g}, expected {expected:.9g}; {int(bad.sum())} differ"
    return ""


def _expected(case: LogitsBenchCase, item: LogitsBenchInputs, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a request, or of a ragged call's token; which there are; and the sums of their magnitudes."""
    return _of_request(case, item, number) if case.form == "paged" else _of_token(case, item, number)


def _of_request(case: LogitsBenchCase, item: LogitsBenchInputs, number: int) -> tuple[Tensor, Tensor, Tensor]:
    assert item.k_cache is not None and item.block_table is not None, "a paged case has pages"
    record, one = case.record, slice(number, number + 1)
    rows = slice(number * case.next_n, (number + 1) * case.next_n)
    # Pages of the request alone, so that no copy is made of all.
    pages = item.k_cache[item.block_table[number].long()]
    table = torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]
    unsigned = pages.clone()
    codes = unsigned.view(len(pages), -1)[:, : case.page_size * record.code_bytes(case.dim)]
    codes.copy_(magnitudes_of_codes(record, codes.contiguous()))
    given: Any = (item.lengths[one], table, record, case.kv_tokens)
    scales: Any = {name: tensor[one] for name, tensor in item.named.items()}
    q, weights = item.q[one], item.weights[rows]
    want, scored = logits_reference(q, pages, weights, *given, **scales)
    size, _ = logits_reference(magnitudes_of_codes(record, q), unsigned, weights.abs(), *given, **scales)
    return want, scored, size


def _of_token(case: LogitsBenchCase, item: LogitsBenchInputs, number: int) -> tuple[Tensor, Tensor, Tensor]:
    assert item.keys is not None and item.key_scales is not None and item.starts is not None, "a ragged case has keys"
    record, one = case.record, slice(number, number + 1)
    windows: Any = (item.starts[one], item.lengths[one], record, None)
    scales: Any = {name: tensor[one] for name, tensor in item.named.items()}
    q, keys, weights = item.q[one], item.keys, item.weights[one]
    want, scored = ragged_reference(q, keys, item.key_scales, weights, *windows, **scales)
    unsigned = magnitudes_of_codes(record, q), magnitudes_of_codes(record, keys)
    size, _ = ragged_reference(*unsigned, item.key_scales, weights.abs(), *windows, **scales)
    return want, scored, size


def our_calls(kernels: Any, case: LogitsBenchCase, inputs: Sequence[LogitsBenchInputs]) -> list[LogitsCall]:
    """One call for each input set, with outputs of its own."""
    dtype = torch.float32 if case.score == "fp32" else torch.bfloat16
    shape = (case.batch * case.next_n, case.kv_tokens)
    calls: list[LogitsCall] = []
    for item in inputs:
        out = torch.full(shape, torch.nan, dtype=dtype, device=item.q.device)
        if case.form == "paged":
            paged = (item.q, item.k_cache, item.weights, item.lengths, item.block_table)
            calls.append(functools.partial(kernels.indexer_logits, *paged, out=out, **item.named))
        else:
            most = case.kv_tokens if case.compressed else None
            ragged = (item.q, item.keys, item.key_scales, item.weights, item.starts, item.lengths)
            options = {"out": out, "max_window": most, **item.named}
            calls.append(functools.partial(kernels.indexer_logits_ragged, *ragged, **options))
    return calls


def logits_floor_us(case: LogitsBenchCase, figures: DeviceFigures) -> float:
    """The larger of the time to move keys and scores once and that of products of e4m3 operands, in us."""
    memory = (case.read_bytes + case.write_bytes) / figures.dram_read_bytes_per_second
    return max(memory, case.flops / figures.e4m3_flops_per_second) * 1e6
