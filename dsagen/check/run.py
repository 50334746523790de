"""`run_check`: every case of a tier against the reference, on a device; without one, what can be proven on the host."""

from __future__ import annotations

import fnmatch
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsagen import knobs
from dsagen.arch import arch as arch_row
from dsagen.check.block_cases import BlockCase, block_cases
from dsagen.check.block_run import BlockRun
from dsagen.check.candidate_cases import CandidateCase, candidate_cases
from dsagen.check.candidate_run import CandidateRun
from dsagen.check.cases import DecodeCase, Probe, Tier, decode_cases
from dsagen.check.host import host_proofs
from dsagen.check.index_cases import Action as IndexAction
from dsagen.check.index_cases import IndexCacheCase, index_cases
from dsagen.check.index_run import IndexCacheKernels, IndexCacheRun
from dsagen.check.indexer_cases import LogitsCase, logits_cases
from dsagen.check.indexer_run import LogitsKernels, LogitsRun
from dsagen.check.kv_cases import Action, KvCase, kv_cases
from dsagen.check.kv_run import CacheKernels, KvRun
from dsagen.check.place import Case, cuda_place, emulator_place
from dsagen.check.probes import CaseRun, NotRunError, WrongResultError
from dsagen.check.ragged_cases import RaggedCase, ragged_cases
from dsagen.check.ragged_run import RaggedRun
from dsagen.check.recording import record_report
from dsagen.check.report import CaseResult, CheckReport
from dsagen.check.scores_run import ScoresRun, has_short_sums
from dsagen.check.step_cases import WINDOW, StepCase, step_cases
from dsagen.check.step_run import StepKernels, StepRun
from dsagen.check.topk_calls import TopkKernels, offered_modes
from dsagen.check.topk_cases import MOST_SLOTS, TopkCase, topk_cases
from dsagen.check.topk_run import TopkRun
from dsagen.dependent import CHAIN_OPS
from dsagen.dtype import E4M3, UE4M3
from dsagen.emulator import DEVICE as EMULATOR
from dsagen.emulator import library as machine
from dsagen.errors import DeviceError, DsagenError, EmulatorLimitError, KnobError, SpecError
from dsagen.evidence import require_recordable
from dsagen.index_format import index_format
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.runtime.api import Kernels
from dsagen.runtime.emulated import EmulatorOptions, require_known_device, require_options
from dsagen.spec import DeploymentSpec, load_spec

Source = str | os.PathLike[str] | Mapping[str, Any] | DeploymentSpec
# The first case of each op; loading its kernels compiles what is missing.
_PLAIN_CASES: Mapping[str, Case] = {
    DecodeCase.op: DecodeCase("", 1, 1, 1, 1, 1),
    TopkCase.op: TopkCase("", 1, 1, 1),
    KvCase.op: KvCase("", Action.READ),
    LogitsCase.op: LogitsCase(""),
    IndexCacheCase.op: IndexCacheCase("", IndexAction.GATHER),
}
# What the runtime gives has all ops; a model of one in a test has one.
Load = Callable[..., Any]


@dataclass
class KernelCache:
    """Kernels by what a case asks of the spec. All of them share their code, since none of it is compile-time."""

    spec: DeploymentSpec
    device: torch.device
    load: Load
    _loaded: dict[tuple[int, str, str], Any] = field(default_factory=dict)

    def __call__(self, case: Case) -> Any:
        """The kernels for a case: its capacity, lse convention and determinism, else the spec's own."""
        if isinstance(case, TopkCase):
            return self._for_topk()
        if isinstance(case, KvCase):
            return self._for_caches()
        if isinstance(case, LogitsCase | RaggedCase | CandidateCase | BlockCase):
            return self._for_logits(case)
        if isinstance(case, IndexCacheCase):
            return self._for_index_cache()
        if isinstance(case, StepCase):
            return self._for_steps(case)
        base, empty = case.lse or (self.spec.lse.base, self.spec.lse.empty)
        determinism = "batch_invariant" if case.probe is Probe.BATCH_INVARIANT else self.spec.determinism
        topk, extra = max(self.spec.topk, case.topk), self.spec.extra_kv
        extra_topk = max(self.spec.extra_topk, case.extra_topk)
        key = (topk, f"{extra_topk} {base} {empty}", determinism)
        if key not in self._loaded:
            other = "none" if extra is None else {**extra.model_dump(), "topk": extra_topk}
            spec = self.spec.replace(
                topk=topk, extra_kv=other, lse={"base": base, "empty": empty}, determinism=determinism
            )
            self._loaded[key] = self.load(spec, device=self.device)
        return self._loaded[key]

    def _for_topk(self) -> TopkKernels:
        """Kernels of top-k alone, with room for the slots of every case."""
        key = (0, TopkCase.op, "")
        if key not in self._loaded:
            spec = self.spec.only(TopkCase.op).replace(extra_kv="none", topk=MOST_SLOTS)
            self._loaded[key] = self.load(spec, device=self.device)
        kernels: TopkKernels = self._loaded[key]
        return kernels

    def _for_caches(self) -> CacheKernels:
        """Kernels of the cache ops alone."""
        key = (0, KvCase.op, "")
        if key not in self._loaded:
            self._loaded[key] = self.load(self.spec.only(KvCase.op), device=self.device)
        kernels: CacheKernels = self._loaded[key]
        return kernels

    def _for_index_cache(self) -> IndexCacheKernels:
        """Kernels of the index cache's ops alone."""
        key = (0, IndexCacheCase.op, "")
        if key not in self._loaded:
            self._loaded[key] = self.load(self.spec.only(IndexCacheCase.op), device=self.device)
        kernels: IndexCacheKernels = self._loaded[key]
        return kernels

    def _for_logits(self, case: LogitsCase | RaggedCase | CandidateCase | BlockCase) -> LogitsKernels:
        """Kernels of the indexer alone, with the case's number of heads."""
        assert self.spec.index is not None
        heads = case.heads or self.spec.index.heads
        key = (heads, LogitsCase.op, "")
        if key not in self._loaded:
            spec = self.spec.only(LogitsCase.op)
            spec = spec.replace(index={**spec.to_mapping()["index"], "heads": heads})
            self._loaded[key] = self.load(spec, device=self.device)
        kernels: LogitsKernels = self._loaded[key]
        return kernels

    def _for_steps(self, case: StepCase) -> StepKernels:
        """Kernels of a whole step, with room for the selection, and for the window where there are two caches."""
        key = (case.k, StepCase.op, "")
        if key not in self._loaded:
            spec, extra = self.spec.only(*CHAIN_OPS), self.spec.extra_kv
            if extra is None:
                spec = spec.replace(topk=max(spec.topk, case.k))
            else:
                wide = {**extra.model_dump(), "topk": max(extra.topk, case.k)}
                spec = spec.replace(topk=max(spec.topk, WINDOW), extra_kv=wide)
            self._loaded[key] = self.load(spec, device=self.device)
        kernels: StepKernels = self._loaded[key]
        return kernels


def run_check(
    source: Source,
    tier: Tier = "quick",
    *,
    seed: int | None = None,
    device: int | str | torch.device | None = None,
    arch: str | None = None,
    only: str | None = None,
    console: Console | None = None,
    record: bool = True,
    record_file: Path | None = None,
    emulator: EmulatorOptions | None = None,
) -> CheckReport:
    """Check the kernels of a spec (a path, a shipped name, a mapping or a DeploymentSpec) on a device.

    device="emulator" runs the same cases on the CPU, as `arch` (the spec's first by default) and with the options
    `emulator`; cases beyond its declared size count as not run.

    Every run draws anew; `seed` replays one. `only` is a shell pattern of case names. Progress goes to `console`,
    nothing is printed without one. A complete device run is recorded as evidence, in the store or in `record_file`,
    unless `record` is False.

    Without a device the report has the host proofs, and every device case as not run. Raises SpecError, GuardError,
    KnobError, BuildError and StoreError as `dsagen.load` does; a failed case is in the report, whose `require_passed`
    raises CheckFailed.
    """
    spec = load_spec(source)
    if knobs.CHECK_INDICES.get():
        raise KnobError(f"{knobs.CHECK_INDICES.name} refuses ids that the check passes on purpose: unset it")
    seed = secrets.randbelow(2**31) if seed is None else seed
    require_known_device(device)
    require_options(emulator)
    emulated = isinstance(device, str) and device == EMULATOR
    if record_file is not None and (only is not None or not record):
        raise SpecError(
            f"record_file {str(record_file)!r} (--record): a run of some cases is no evidence, and nothing is recorded "
            "of one with record=False: leave either out"
        )
    if not emulated and (arch is not None or emulator is not None):
        raise SpecError(f"arch {arch!r}: only the emulator stands for an arch of choice: pass device={EMULATOR!r}")
    problem = "" if emulated else device_problem(spec, device)
    if problem:
        cases = cases_of(spec, spec.archs[0], tier, only)
        skipped = tuple(_not_run(case, problem) for case in cases)
        return CheckReport(spec.name, tier, seed, None, problem, skipped, host_proofs(spec, seed))
    place = emulator_place(spec, arch, emulator) if emulated else cuda_place(_cuda_device(device))
    # What is wrong with the request is said before anything is compiled or run.
    cases = cases_of(spec, place.arch, tier, only)
    recorded = record and only is None
    if recorded:
        require_recordable(record_file)
    host = host_proofs(spec, seed)
    if emulated and console is not None and not machine.is_kept():
        console.print(f"{machine.COMPILE_NOTE} ...", highlight=False)
    with place.current():
        kernels = KernelCache(spec, place.device, place.load)
        # Loading compiles what is missing; a build error is the caller's, no case's.
        for op in spec.ops:
            kernels(_PLAIN_CASES[op])
        results = run_cases(cases, kernels, place.device, seed, console, place.refusal)
        report = CheckReport(spec.name, tier, seed, place.name, "", results, host, place.arch)
        if recorded:
            record_report(spec, place.arch, report, record_file)
    return report


def run_cases(
    cases: Sequence[Case],
    kernels: Callable[[Any], Any],
    device: torch.device,
    seed: int,
    console: Console | None = None,
    refusal: Callable[[Case], str] = lambda case: "",
) -> tuple[CaseResult, ...]:
    """Run cases one by one, but those that `refusal` finds too large.

    After a fault of the device the rest does not run, since nothing there can be trusted.
    """
    results: list[CaseResult] = []
    fault = ""
    with _progress(console, len(cases)) as advance:
        for case in cases:
            why = fault or refusal(case)
            if why:
                results.append(_not_run(case, why))
                continue
            advance(case.name)
            kind = RUNS[type(case)]
            result, faulted = run_case(kind(case, kernels, device, seed))
            results.append(result)
            if faulted:
                fault = f"the device faulted in {case.name}"
    return tuple(results)


AnyRun = CaseRun | TopkRun | KvRun | LogitsRun | IndexCacheRun | StepRun | RaggedRun | CandidateRun | BlockRun
# What runs a case, by its type.
RUNS: Mapping[type, Callable[..., AnyRun]] = {
    DecodeCase: CaseRun,
    TopkCase: TopkRun,
    KvCase: KvRun,
    LogitsCase: LogitsRun,
    IndexCacheCase: IndexCacheRun,
    StepCase: StepRun,
    RaggedCase: RaggedRun,
    CandidateCase: CandidateRun,
    BlockCase: BlockRun,
}


def _not_run(case: Case, why: str) -> CaseResult:
    return CaseResult(case.name, "not_run", problem=why, op=case.op)


def run_case(run: AnyRun) -> tuple[CaseResult, bool]:
    """(result, whether the device is now unusable)."""
    result, faulted = _run_case(run)
    return replace(result, op=run.case.op, slugs=_slugs(run)), faulted


def _slugs(run: AnyRun) -> tuple[str, ...] | None:
    """Kernels that a case says something of; None for all that there are of its op."""
    if isinstance(run, TopkRun):
        return tuple(sorted(run.launched))
    if isinstance(run, CaseRun | StepRun):
        # Without one it came to no plan, or to one that does not tell.
        return tuple(sorted(run.launched)) or None
    if isinstance(run, ScoresRun):
        kernels: Any = run.kernels(run.case)  # type: ignore[arg-type]
        if len(kernels.spec.index.forms) > 1:
            names: tuple[str, ...] = kernels.logits_slugs(run.form)
            return names
    return None


def _run_case(run: AnyRun) -> tuple[CaseResult, bool]:
    name, start = run.case.name, time.perf_counter()
    try:
        if not isinstance(run, CaseRun):
            run.run()  # there are no errors to report: what is not equal raises
            return CaseResult(name, "passed", time.perf_counter() - start), False
        comparison = run.run()
    except (NotRunError, EmulatorLimitError) as reason:
        return CaseResult(name, "not_run", problem=str(reason)), False
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return CaseResult(name, "not_run", problem=f"out of memory: {str(error).splitlines()[0]}"), False
    except WrongResultError as error:
        return CaseResult(name, "failed", time.perf_counter() - start, problem=str(error)), False
    except (DsagenError, RuntimeError) as error:
        faulted = isinstance(error, DeviceError) or not isinstance(error, DsagenError)
        text = f"{type(error).__name__}: {str(error).strip()}"
        return CaseResult(name, "failed", time.perf_counter() - start, problem=text), faulted
    out, lse = comparison.out, comparison.lse
    return CaseResult(
        name,
        "passed" if comparison.passed else "failed",
        time.perf_counter() - start,
        out.worst_abs,
        out.worst_rel,
        out.cos,
        out.worst_group,
        lse.worst_abs,
        lse.worst_rel,
        comparison.problem,
    ), False


def cases_of(spec: DeploymentSpec, arch: str, tier: Tier, only: str | None = None) -> tuple[Case, ...]:
    """The cases for a spec's kernels on an arch, op by op; SpecError when `only` matches none."""
    matrix = expand(spec, (arch,))
    matrix.require_complete()
    cases: tuple[Case, ...] = ()
    short_sums = has_short_sums(matrix)
    for op in spec.ops:
        if op == TopkCase.op:
            cases += topk_cases(tier, offered_modes(Kernels.topk))
        elif op == KvCase.op:
            cases += kv_cases(spec, tier)
        elif op == LogitsCase.op:
            # Without a conversion instruction e4m3 codes are shifted into place, and code 0x7F reads as 480.
            assert spec.index is not None, "a spec with the op has an index"
            keeps_nan = index_format(spec.index.keys).values is E4M3 and arch_row(arch).has_e4m3_cvt
            cases += logits_cases(tier, keeps_nan, short_sums) if "paged" in spec.index.forms else ()
            cases += ragged_cases(tier, keeps_nan, short_sums) if "ragged" in spec.index.forms else ()
            cases += block_cases(tier, keeps_nan, short_sums) if "blocks" in spec.index.forms else ()
            cases += candidate_cases(tier, keeps_nan) if "candidates" in spec.index.forms else ()
        elif op == IndexCacheCase.op:
            cases += index_cases(tier)
        else:
            cases += _decode_cases(spec, main_plan(matrix.plans()), arch, tier)
    # The chain of them; its cases are evidence for no kernel, since each has those of its op.
    steps = set(CHAIN_OPS) <= set(spec.ops) and spec.index is not None and "paged" in spec.index.forms
    chooses = steps and spec.index is not None and {"blocks", "candidates"} <= set(spec.index.forms)
    counts = steps and spec.index is not None and spec.index.histogram
    cases += step_cases(tier, short_sums, chooses, counts) if steps else ()
    if only is None:
        return cases
    chosen = tuple(case for case in cases if fnmatch.fnmatchcase(case.name, only))
    if not chosen:
        kinds = ", ".join(dict.fromkeys(case.name.split(".")[0] for case in cases))
        raise SpecError(f"{spec.name}: no case of the {tier} tier matches {only!r}: names begin with {kinds}")
    return chosen


def _decode_cases(spec: DeploymentSpec, main: KernelPlan, arch: str, tier: Tier) -> tuple[DecodeCase, ...]:
    record = spec.kv_format
    # Without a conversion instruction e4m3 codes are shifted into place, and code 0x7F reads as 480.
    shifted = (E4M3, UE4M3)
    elements = {s.element for fmt in (record, spec.extra_kv_format) if fmt for s in fmt.segments}
    keeps_nan = arch_row(arch).has_e4m3_cvt or not elements.intersection(shifted)
    two_caches = spec.extra_kv_format is not None
    return decode_cases(tier, main.constant("kTileTokens"), record.record_bytes, keeps_nan, two_caches, spec.kv_heads)


def main_plan(plans: Sequence[KernelPlan]) -> KernelPlan:
    """The main kernel of sparse decode among a spec's plans."""
    return next(plan for plan in plans if plan.variant.family == DecodeCase.op and plan.variant.kernel == "main")


def device_problem(spec: DeploymentSpec, device: int | str | torch.device | None = None) -> str:
    """Why the spec's kernels cannot run on a device (the current one by default), empty when they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    chosen = _cuda_device(device)
    capability = torch.cuda.get_device_capability(chosen)
    if capability in {row.compute_capability for row in spec.arch_rows}:
        return ""
    name = torch.cuda.get_device_name(chosen)
    return f"{name} is of compute capability {capability[0]}.{capability[1]}, the spec declares {', '.join(spec.archs)}"


def _cuda_device(device: int | str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r}: {error}") from None
    if found.type != "cuda" or (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device {device!r}: expected one of {torch.cuda.device_count()} CUDA devices")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def _progress(console: Console | None, total: int) -> AbstractContextManager[Callable[[str], None]]:
    if console is None:
        return nullcontext(lambda name: None)
    return _CaseProgress(console, total)


class _CaseProgress(AbstractContextManager[Callable[[str], None]]):
    def __init__(self, console: Console, total: int) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Callable[[str], None]:
        self._progress.start()
        return self._next

    def _next(self, name: str) -> None:
        self._progress.update(self._task, advance=1, description=name)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
