"""Measuring the contest's two kernels over workloads of its inventory's shapes, by its entry points and its rules.

Figures are means over a group of workloads, as the contest takes them, by graph replay with a cold L2 cache: they are
not those of its own harness, nor to be set beside ones of another device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import dsagen
from dsagen.arch import arch_for_capability
from dsagen.bench import contest_data as contest
from dsagen.bench.figures import CaseKey, PeerFigure, case_key, is_slower, number
from dsagen.bench.timing import Call, graph_time_us, input_sets_for
from dsagen.compat.contest import ATTENTION, INDEXER, run_attention, run_indexer, use
from dsagen.errors import CheckFailed
from dsagen.plan import KernelPlan
from dsagen.spec import DeploymentSpec

SPECS = ("contest_indexer_h64", "contest_attention_h16")
# Of one workload, each with requests and pages of its own.
MOST_SETS = 16
_ROW_BYTES, _KEY_BYTES = 2 * (512 + 64), 132


@dataclass(frozen=True)
class ContestGroup:
    """Workloads of one kernel that are alike."""

    name: str
    workloads: tuple[Any, ...]


@dataclass(frozen=True)
class ContestFigures:
    """A group on one device: `gpu_us` is the mean GPU time of its workloads, `least_us` and `most_us` the extremes."""

    spec: str
    slugs: tuple[str, ...]
    device: str
    arch: str
    group: str
    workloads: int
    gpu_us: float
    least_us: float
    most_us: float
    record_us: float | None = None
    peers: tuple[PeerFigure, ...] = ()
    missed: tuple[str, ...] = ()

    op: ClassVar[str] = "contest"
    header: ClassVar[tuple[str, ...]] = ("workloads", "of them", "mean GPU us", "least us", "most us", "last us")

    @property
    def title(self) -> str:
        """The group in words."""
        return f"{self.workloads} workloads: {self.group}"

    @property
    def case(self) -> dict[str, Any]:
        """What makes two figures comparable."""
        return {"contest": self.spec, "group": self.group, "workloads": self.workloads}

    @property
    def slower(self) -> bool:
        """Whether the group takes notably longer than its last record."""
        return is_slower(self.gpu_us, self.record_us)

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        times = (f"{us:.2f}" for us in (self.gpu_us, self.least_us, self.most_us))
        return (self.group, str(self.workloads), *times, number(self.record_us, ".2f"))

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec itself."""
        return spec

    def took_part(self, plan: KernelPlan) -> bool:
        """Whether it is one of the group's kernels."""
        return plan.slug in self.slugs

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        return {
            "spec": self.spec,
            "slugs": list(self.slugs),
            "device": self.device,
            "case": self.case,
            "gpu_us": round(self.gpu_us, 3),
            "least_us": round(self.least_us, 3),
            "most_us": round(self.most_us, 3),
            "missed": [],
            "record_us": self.record_us,
            "peers": [],
        }


def contest_groups(name: str) -> tuple[ContestGroup, ...]:
    """The workloads of one of `SPECS`, in the groups that the inventory tells apart."""
    if name == SPECS[1]:
        every: list[Any] = list(contest.attention_workloads())
        few, many = [w for w in every if len(w.counts) <= 2], [w for w in every if len(w.counts) > 2]
        return ContestGroup("1 or 2 tokens", tuple(few)), ContestGroup("6 to 8 tokens", tuple(many))
    every = list(contest.indexer_workloads())
    bounds = ((1, 32, "up to 32 pages: nothing is scored"), (33, 45, "33 to 45 pages"), (82, 91, "82 to 91 pages"))
    return tuple(
        ContestGroup(text, tuple(w for w in every if low <= w.max_num_pages <= high)) for low, high, text in bounds
    )


def sweep_contest(
    spec: DeploymentSpec,
    *,
    seed: int,
    records: Mapping[CaseKey, float],
    progress: Callable[[str], None],
    wrong: Callable[[str], None],
    groups: Sequence[ContestGroup] | None = None,
    pages: int | None = None,
) -> list[ContestFigures]:
    """The groups of one of `SPECS` on the current device, and all of them together.

    What is wrong with a workload goes to `wrong`, and its group is left out. `groups` and `pages` replace the
    contest's, for tests.
    """
    kernels = dsagen.load(spec)
    kernels.prepare()
    use(kernels)
    try:
        bound = _Attention(kernels, pages) if spec.name == SPECS[1] else _Indexer(kernels, pages)
        figures: list[ContestFigures] = []
        every: list[float] = []
        for group in contest_groups(spec.name) if groups is None else groups:
            try:
                found, times = _measure(bound, group, seed)
            except CheckFailed as error:
                wrong(str(error))
                continue
            every += times
            figures.append(found)
            progress(f"{spec.name}: {found.title}: {found.gpu_us:.2f} us")
    finally:
        INDEXER.forget()
        ATTENTION.forget()
    if len(figures) > 1:
        slugs = tuple(dict.fromkeys(slug for found in figures for slug in found.slugs))
        whole = replace(figures[0], group="all", slugs=slugs, workloads=len(every))
        figures.append(_with_times(whole, every))
    return [replace(found, record_us=records.get(case_key(found.case))) for found in figures]


class _Indexer:
    """dsa_topk_indexer over one cache."""

    def __init__(self, kernels: Any, pages: int | None) -> None:
        self.kernels, self.pages = kernels, pages or contest.INDEXER_PAGES
        self._cache = contest.index_cache(self.pages, kernels.device)

    def inputs(self, work: contest.IndexerWorkload, seed: int) -> tuple[Tensor, ...]:
        return contest.indexer_inputs(work, self.pages, self.kernels.device, seed, self._cache)

    def call(self, inputs: tuple[Tensor, ...]) -> Call:
        ids = torch.empty((len(inputs[0]), contest.K), dtype=torch.int32, device=inputs[0].device)
        arguments: Any = (*inputs, ids)
        return partial(run_indexer, *arguments)

    def problem(self, inputs: tuple[Tensor, ...], found: Tensor) -> str:
        return contest.indexer_problem(inputs, found)

    def read_bytes(self, work: contest.IndexerWorkload) -> int:
        return sum(length * _KEY_BYTES for length in work.seq_lens if length > contest.K) + 4 * contest.K

    def slugs(self, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
        width = int(inputs[4].shape[1]) * contest.PAGE
        scores = torch.empty((len(inputs[0]), width), device=inputs[0].device)
        logits: tuple[str, ...] = self.kernels.logits_slugs("paged") if width > contest.K else ()
        selected: tuple[str, ...] = self.kernels.topk_slugs(scores, k=contest.K)
        return (*logits, *selected)


class _Attention:
    """dsa_sparse_attention over one pair of caches."""

    def __init__(self, kernels: Any, pages: int | None) -> None:
        self.kernels, self.pages = kernels, pages or contest.ATTENTION_PAGES
        none = contest.attention_inputs(contest.AttentionWorkload((1,)), self.pages, kernels.device)
        self._caches = none[2], none[3]

    def inputs(self, work: contest.AttentionWorkload, seed: int) -> tuple[Tensor, ...]:
        return contest.attention_inputs(work, self.pages, self.kernels.device, seed, self._caches)

    def call(self, inputs: tuple[Tensor, ...]) -> Call:
        q = inputs[0]
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        arguments: Any = (*inputs, torch.empty_like(q), lse)
        return partial(run_attention, *arguments)

    def problem(self, inputs: tuple[Tensor, ...], found: tuple[Tensor, Tensor]) -> str:
        return contest.attention_problem(inputs, found)

    def read_bytes(self, work: contest.AttentionWorkload) -> int:
        return sum(work.counts) * _ROW_BYTES

    def slugs(self, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
        found: tuple[str, ...] = self.kernels.plan_sparse_decode(len(inputs[0]), 1, contest.K).slugs
        return found


def _measure(bound: Any, group: ContestGroup, seed: int) -> tuple[ContestFigures, list[float]]:
    """The group's figures and the time of each workload. CheckFailed for a result that breaks the rules."""
    properties = torch.cuda.get_device_properties(bound.kernels.device)
    times: list[float] = []
    slugs: dict[str, None] = {}
    for place, work in enumerate(group.workloads):
        sets = input_sets_for(bound.read_bytes(work), most=MOST_SETS)
        inputs = [bound.inputs(work, seed + place * MOST_SETS + item) for item in range(sets)]
        calls = [bound.call(item) for item in inputs]
        problem = bound.problem(inputs[0], calls[0]())
        if problem:
            raise CheckFailed(f"{bound.kernels.spec.name}: {group.name}, workload {place}: {problem}; it was not timed")
        times.append(graph_time_us(calls).median_us)
        slugs |= dict.fromkeys(bound.slugs(inputs[0]))
    arch = arch_for_capability(properties.major, properties.minor)
    name = bound.kernels.spec.name
    blank = ContestFigures(name, tuple(slugs), properties.name, arch.name, group.name, len(times), 0.0, 0.0, 0.0)
    return _with_times(blank, times), times


def _with_times(found: ContestFigures, times: Sequence[float]) -> ContestFigures:
    return replace(found, gpu_us=sum(times) / len(times), least_us=min(times), most_us=max(times))
