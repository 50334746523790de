"""Measuring a list of shapes beside every peer that can run them: replays of all contestants alternate.

What a shape costs beside its replays is kept small: the pool and the kernels serve all shapes, and each shape's inputs
serve all its contestants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import dsagen
from dsagen.bench.figures import DecodeFigures, PeerFigure
from dsagen.bench.peers import PEERS, Peer
from dsagen.bench.run import (
    CheckedCalls,
    Pools,
    Prepared,
    Records,
    Wrong,
    checked_peer,
    failed_peer,
    prepare_case,
    raise_wrong,
    with_context,
)
from dsagen.bench.shapes import Shape, case_of, specs_of
from dsagen.bench.timing import Contestant, eager_cost_us, take_turns
from dsagen.bench.verdicts import ComparedShape
from dsagen.errors import CheckFailed
from dsagen.spec import DeploymentSpec

# Of each contestant, before its first turn.
WARM_MS = 10.0
# A round of eager calls is enough for a figure that stands beside the verdict and is no part of it.
EAGER_CALLS = 100


def sweep_shapes(
    spec: DeploymentSpec,
    shapes: Sequence[Shape],
    *,
    with_peers: bool = False,
    seed: int = 0,
    records: Records | None = None,
    wrong: Wrong = raise_wrong,
    deadline_s: float = math.inf,
) -> Iterator[ComparedShape]:
    """Measure shapes, in their order, with the kernels of a spec and its shapes' head counts, on the current device.

    Each comes as soon as it is measured; none is begun after `deadline_s` of the monotonic clock. One whose output is
    wrong is left out; what is wrong goes to `wrong`. A peer that is missing, refuses or is wrong becomes a note. Raises
    DeviceError without a device that the spec declares, SpecError for a shape that the spec cannot have.
    """
    loaded = {made.heads: dsagen.load(made) for made in specs_of(spec, shapes)}
    for kernels in loaded.values():
        kernels.prepare()
    pools = Pools(with_peers)
    for shape in shapes:
        if time.monotonic() > deadline_s:
            return
        kernels = loaded[shape.heads]
        case = case_of(kernels.spec, shape)
        prepared = prepare_case(case, *pools.of(case, kernels.device), seed)
        try:
            checked = CheckedCalls.of(kernels, prepared)
        except CheckFailed as error:
            wrong(str(error))
            continue
        figures, peers = _compare(checked, prepared, with_peers)
        yield ComparedShape(shape, with_context(figures, peers, records or {}))


def _compare(
    checked: CheckedCalls, prepared: Prepared, with_peers: bool
) -> tuple[DecodeFigures, tuple[PeerFigure, ...]]:
    """Our figures and the peers', from replays that alternate."""
    ours = Contestant(checked.captured, warm_ms=WARM_MS)
    entered = [_enter(peer, prepared) for peer in PEERS] if with_peers else []
    contestants = [ours, *(contestant for contestant, _ in entered if contestant is not None)]
    try:
        take_turns(contestants)
    finally:
        for contestant in contestants:
            contestant.close()
    peers = tuple(
        figure if contestant is None else replace(figure, gpu_us=contestant.timing.median_us)
        for contestant, figure in entered
    )
    eager_us = eager_cost_us(checked.eager, calls_per_round=EAGER_CALLS, rounds=1)
    return checked.figures(ours.timing, eager_us), peers


def _enter(peer: Peer, prepared: Prepared) -> tuple[Contestant | None, PeerFigure]:
    """A peer's captured calls, None where its figure says why there are none."""
    calls, figure = checked_peer(peer, prepared)
    if not calls:
        return None, figure
    try:
        return Contestant(calls, warm_ms=WARM_MS), figure
    except Exception as error:
        return None, failed_peer(peer, error)
