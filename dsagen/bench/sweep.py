"""The sweep over specs and their ops; each op's own module measures it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsagen.bench import cache_run, contest_run, logits_run, run, step_run, topk_run
from dsagen.bench.axes import SweepAxes
from dsagen.bench.contest_run import ContestFigures
from dsagen.bench.figures import DecodeFigures, Figures
from dsagen.bench.logits_figures import LogitsFigures
from dsagen.bench.run import Progress, Records, Wrong, raise_wrong
from dsagen.bench.step_figures import StepFigures
from dsagen.bench.topk_figures import TopkFigures
from dsagen.dependent import CHAIN_OPS
from dsagen.errors import DeviceError, SpecError
from dsagen.spec import DeploymentSpec

MEASURED_OPS = (DecodeFigures.op, TopkFigures.op, LogitsFigures.op, cache_run.KV, cache_run.INDEX)
# Of specs with all of a step's ops, the whole as well; of the contest's specs, its kernels.
MEASURED = (*MEASURED_OPS, StepFigures.op, ContestFigures.op)


def run_sweep(
    specs: Sequence[DeploymentSpec],
    *,
    with_peers: bool = False,
    seed: int = 0,
    records: Records | None = None,
    progress: Progress = lambda _: None,
    wrong: Wrong = raise_wrong,
    axes: SweepAxes = SweepAxes(),  # noqa: B008
    only: str | None = None,
) -> list[Figures]:
    """Measure every case of the specs' ops, or of `only` one of MEASURED, on the current device.

    `records` maps a case's key to the GPU time of its last record; `axes` gives other cases of sparse decode, and
    nothing but that is measured. Cases with a wrong output are left out, and what is wrong goes to `wrong`, which
    raises CheckFailed unless given. Raises DeviceError without a device that the specs declare, SpecError for a spec
    without an op that is measured. A peer that is missing, refuses or is wrong becomes a note.
    """
    for spec in specs:
        if not set(MEASURED_OPS) & set(spec.ops):
            raise SpecError(
                f"{spec.name}: bench measures {', '.join(MEASURED_OPS)}, and the spec's ops are {', '.join(spec.ops)}: "
                "leave it out"
            )
    known = records or {}
    measured = MEASURED if only is None else (only,)
    for spec in specs:
        if only == ContestFigures.op and spec.name not in contest_run.SPECS:
            raise SpecError(f"{spec.name}: the contest is of {' and '.join(contest_run.SPECS)}: leave it out")
        if only is not None and not set(_ops_of(only)) <= set(spec.ops):
            raise SpecError(f"{spec.name}: {only} takes {', '.join(_ops_of(only))}, which its ops lack: leave it out")
    decoding = [spec for spec in specs if DecodeFigures.op in spec.ops and DecodeFigures.op in measured]
    figures: list[Figures] = list(
        run.sweep_decode(
            decoding, with_peers=with_peers, seed=seed, records=known, progress=progress, wrong=wrong, axes=axes
        )
    )
    for spec in specs:
        if TopkFigures.op in spec.ops and TopkFigures.op in measured and not axes:
            figures += topk_run.sweep_topk(
                spec, with_peers=with_peers, seed=seed, records=known, progress=progress, wrong=wrong
            )
        if LogitsFigures.op in spec.ops and LogitsFigures.op in measured and not axes:
            figures += logits_run.sweep_logits(
                spec, with_peers=with_peers, seed=seed, records=known, progress=progress, wrong=wrong
            )
        for op in (cache_run.KV, cache_run.INDEX):
            if op in spec.ops and op in measured and not axes:
                figures += cache_run.sweep_caches(spec, op, seed=seed, records=known, progress=progress, wrong=wrong)
    for spec in specs:
        if set(_ops_of(StepFigures.op)) <= set(spec.ops) and StepFigures.op in measured and not axes:
            if spec.index is None or "paged" not in spec.index.forms:
                progress(f"{spec.name}: steps are measured with index keys in pages only: not those of this spec")
                continue
            figures += step_run.sweep_steps(
                spec, with_peers=with_peers, seed=seed, records=known, progress=progress, wrong=wrong
            )
    for spec in specs:
        if spec.name in contest_run.SPECS and ContestFigures.op in measured and not axes:
            figures += contest_run.sweep_contest(spec, seed=seed, records=known, progress=progress, wrong=wrong)
    return figures


def _ops_of(name: str) -> tuple[str, ...]:
    """The ops that a spec needs for what is measured."""
    if name == ContestFigures.op:
        return ()
    return CHAIN_OPS if name == StepFigures.op else (name,)


def current_device_name() -> str:
    """The name of torch's current device; DeviceError without one."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device: a benchmark needs a GPU that the spec declares; `dsagen build` works without"
        )
    return torch.cuda.get_device_name()
