"""From rendered units to store entries: look up, compile what is missing, publish each kernel as it finishes."""

from __future__ import annotations

import errno
import logging
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dsagen.arch import ARCHS
from dsagen.build.compile import LOG, CompileOutcome, CompileTask, compile_command, run_compiles
from dsagen.build.entry import PLAN, REPORT, VARIANT, BrokenEntryError, EntryStamp, StoreEntry
from dsagen.build.jobs import job_count
from dsagen.build.key import entry_key, entry_name, source_key
from dsagen.build.patience import patiently
from dsagen.build.progress import BuildProgress, QuietProgress
from dsagen.build.report import first_error, hint, parse_report, refusal
from dsagen.build.store import EntryLock, Store
from dsagen.build.toolchain import Toolchain, find_toolchain
from dsagen.build.unit import Unit
from dsagen.ending import cleaning_up_first
from dsagen.errors import BuildError, StoreError, ToolchainError

_LOG = logging.getLogger(__name__)
# Locks, and so open files, that one process holds at once; what is beyond waits for the next round.
_MOST_LOCKS = 256
# With less than this free, a compile that fails without a word has most likely had no room for its output.
_FULL_DISK_BYTES = 1 << 20


@dataclass(frozen=True)
class BuildResult:
    """What became of one unit: its entry, whether it was there already, and the compile's wall time in seconds."""

    entry: StoreEntry
    was_cached: bool
    seconds: float


def build_units(
    units: Sequence[Unit],
    store: Store,
    toolchain_finder: Callable[[], Toolchain] | None = None,
    progress: BuildProgress | None = None,
    jobs: int | None = None,
    force: bool = False,
) -> list[BuildResult]:
    """The store entry of every unit, in order, compiling those that are missing (all of them when `force`).

    Hits need no toolchain and no writable store. The toolchain is the first that is new enough for every unit's arch,
    unless a finder is given. `jobs` overrides the count from cores, memory and DSAGEN_MAX_JOBS.
    Raises StoreError or ToolchainError when something must be compiled and cannot be, BuildError when a kernel fails;
    the kernels that did compile are then in the store.
    """
    unique = {unit.slug: unit for unit in units}
    for unit in units:
        if unique[unit.slug].text != unit.text or unique[unit.slug].arch != unit.arch:
            raise BuildError(f"two different kernels share the slug {unit.slug}")
    toolchain, problem = _try_toolchain(toolchain_finder or (lambda: find_toolchain(_minimums(units))))
    results, missing, reasons = _split_hits(unique, store, toolchain, force)
    if problem is not None and not missing:
        # Nothing had to be compiled, so the hits stand; yet what is wrong with the toolchain is worth a line.
        _LOG.info("%s", problem)
    if missing:
        try:
            store.writable_root()
        except StoreError as error:
            raise StoreError(f"{_missing_text(missing)}, and {error}") from None
        if toolchain is None:
            raise ToolchainError(f"{_missing_text(missing)}, and nothing can compile. {problem}") from problem
        toolchain.require_host_compiler()
        for line in toolchain.skipped:
            _LOG.info("skipped %s", line)
        _LOG.info("compiling with nvcc %s (%s, from %s)", toolchain.version, toolchain.nvcc, toolchain.origin)
        session = _Session(store, toolchain, progress or QuietProgress(), jobs, force, reasons)
        results |= session.build(missing)
    return [results[unit.slug] for unit in units]


def write_generated(units: Sequence[Unit], out_dir: Path) -> list[Path]:
    """Write each unit's text to `<out_dir>/generated/<arch>/<slug>.cu`, equal files untouched; the paths."""
    paths = []
    for unit in units:
        path = out_dir / "generated" / unit.arch / f"{unit.slug}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = unit.text.encode()
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EEXIST, "is neither a file nor a folder", str(path))  # opening a pipe would wait
        if not path.is_file() or path.read_bytes() != text:
            path.write_bytes(text)
        paths.append(path)
    return paths


def _minimums(units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
    """The least CUDA release of each arch that the units are for."""
    return {unit.arch: ARCHS[unit.arch].min_cuda for unit in units if unit.arch in ARCHS}


def _try_toolchain(finder: Callable[[], Toolchain]) -> tuple[Toolchain | None, ToolchainError | None]:
    try:
        return finder(), None
    except ToolchainError as problem:
        return None, problem


def _split_hits(
    unique: dict[str, Unit], store: Store, toolchain: Toolchain | None, force: bool
) -> tuple[dict[str, BuildResult], list[Unit], dict[str, str]]:
    """(results of the hits, what has to be compiled, why by slug)."""
    results = {}
    missing = []
    reasons = {}
    for slug, unit in unique.items():
        found = store.examine(unit, toolchain)
        if found.entry is not None and not force:
            results[slug] = BuildResult(found.entry, True, 0.0)
            _LOG.debug("%s: found in %s", slug, found.entry.path.parent.parent)
        else:
            missing.append(unit)
            reasons[slug] = "forced" if force else found.reason
            _LOG.debug("%s: to compile (%s)", slug, reasons[slug])
    return results, missing, reasons


def _text_of(path: Path) -> str:
    """A log's text; none where the compile has left none."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _missing_text(missing: Sequence[Unit]) -> str:
    names = ", ".join(unit.slug for unit in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"{len(missing)} kernel{'s are' if len(missing) > 1 else ' is'} not in the store ({names})"


@dataclass
class _Session:
    """One call's compiles: the locks held, the results and the failures so far."""

    store: Store
    toolchain: Toolchain
    progress: BuildProgress
    jobs: int | None
    force: bool
    reasons: dict[str, str]
    locks: dict[str, EntryLock] = field(default_factory=dict)
    results: dict[str, BuildResult] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    jobs_used: int = 1

    def build(self, missing: Sequence[Unit]) -> dict[str, BuildResult]:
        """Compile `missing`; the results by slug.

        A lock that another process holds is never waited for while own ones are held, so that no two can block each
        other: what is free is built and published first.
        """
        total = len(missing)
        try:
            self.store.sweep_abandoned()
            while missing:
                mine, others = self._claim(missing)
                if mine:
                    self._compile(mine)
                elif others:
                    self._wait_for(others[0])
                missing = others
        except OSError as error:
            raise StoreError(f"the kernel store failed: {error}. DSAGEN_CACHE_DIR names its folder.") from None
        finally:
            for lock in self.locks.values():
                lock.release()
        if self.failures:
            counts = f"{len(self.failures)} of {total} kernel{'s' if total > 1 else ''} did not build:"
            raise BuildError("\n".join([counts, *self.failures]))
        return self.results

    def _name(self, unit: Unit) -> str:
        return entry_name(unit.slug, entry_key(source_key(unit), self.toolchain.version))

    def _claim(self, units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """(units whose lock is now held and that are still missing, units that another holder is at)."""
        mine: list[Unit] = []
        others: list[Unit] = []
        for unit in units:
            name = self._name(unit)
            lock = self.store.lock(name)
            if len(mine) >= _MOST_LOCKS or not lock.acquire(wait=False):
                others.append(unit)
                continue
            self.locks[name] = lock
            entry = None if self.force else self.store.lookup(unit, self.toolchain)
            if entry is not None:
                self.results[unit.slug] = BuildResult(entry, True, 0.0)
                self._unlock(name)
            else:
                self.store.sweep(name)
                mine.append(unit)
        return mine, others

    def _wait_for(self, unit: Unit) -> None:
        name = self._name(unit)
        _LOG.info("waiting for another process that builds %s", name)
        self.progress.wait(name)
        with self.store.lock(name):
            pass

    def _unlock(self, name: str) -> None:
        self.locks.pop(name).release()

    def _compile(self, units: Sequence[Unit]) -> None:
        # A process that loads kernels may be ended meanwhile, as those of the command line.
        with cleaning_up_first():
            self._compile_all(units)

    def _compile_all(self, units: Sequence[Unit]) -> None:
        tasks = [
            CompileTask(unit, name, self.store.make_work_dir(name)) for unit in units for name in [self._name(unit)]
        ]
        self.jobs_used = job_count(len(tasks), self.jobs)
        for task in tasks:
            _LOG.debug("%s: %s", task.name, compile_command(task.unit, task.name, self.toolchain))
        start = time.monotonic()
        try:
            self.progress.begin(len(tasks), self.jobs_used)
            run_compiles(tasks, self.toolchain, self.jobs_used, self._finish, self.progress.look)
        finally:
            self.progress.end()
            for task in tasks:
                shutil.rmtree(task.work_dir, ignore_errors=True)
        _LOG.info("compiled %d kernels in %.2f s, %d at once", len(tasks), time.monotonic() - start, self.jobs_used)

    def _finish(self, outcome: CompileOutcome) -> None:
        """Publish one kernel, or keep its remains and say what went wrong; its lock is free afterwards."""
        task = outcome.task
        failure = self._publish(outcome)
        if failure is not None:
            self.failures.append(failure)
        self.progress.finish(task.name, outcome.seconds, failure, outcome.memory_bytes)
        self._unlock(task.name)

    def _publish(self, outcome: CompileOutcome) -> str | None:
        task = outcome.task
        log_path = task.entry_dir / LOG
        log = patiently(lambda: _text_of(log_path))
        if outcome.exit_code != 0:
            return self._failure_text(outcome, first_error(log), log)
        report = parse_report(log, task.unit.symbol)
        if report is None:
            return self._failure_text(outcome, f"ptxas reported no entry function named {task.unit.symbol}", log)
        refused = refusal(report, task.unit.plan)
        if refused is not None:
            return self._failure_text(outcome, refused, log)
        figures = {
            **asdict(report),
            "seconds": round(outcome.seconds, 3),
            "memory_bytes": outcome.memory_bytes,
            "command": compile_command(task.unit, task.name, self.toolchain),
            "nvcc_version": self.toolchain.version,
        }
        texts = {VARIANT: dict(task.unit.variant), PLAN: dict(task.unit.plan), REPORT: figures}
        try:
            entry = self.store.publish(task.entry_dir, self._stamp(task), texts)
        except BrokenEntryError as problem:
            return self._failure_text(outcome, str(problem), log)
        self.results[task.unit.slug] = BuildResult(entry, False, outcome.seconds)
        reason = self.reasons[task.unit.slug]
        _LOG.info("compiled %s in %.2f s, %d registers (%s)", task.name, outcome.seconds, report.registers, reason)
        return None

    def _stamp(self, task: CompileTask) -> EntryStamp:
        source = source_key(task.unit)
        return EntryStamp(
            name=task.name,
            slug=task.unit.slug,
            symbol=task.unit.symbol,
            arch=task.unit.arch,
            source_key=source,
            key=entry_key(source, self.toolchain.version),
            nvcc_version=self.toolchain.version,
        )

    def _failure_text(self, outcome: CompileOutcome, error: str, log: str) -> str:
        task = outcome.task
        kept = self.store.keep_failed(task.entry_dir, task.name)
        advice = hint(log, outcome.exit_code, self.jobs_used)
        if advice is None and shutil.disk_usage(kept).free < _FULL_DISK_BYTES:
            advice = "the disk of the store is full"
        lines = [f"{task.unit.slug}: {error}"]
        if advice:
            lines.append(f"  hint: {advice}")
        lines.append(f"  log: {kept / LOG}")
        lines.append(
            f"  repeat: cd {shlex.quote(str(kept))} && {compile_command(task.unit, task.name, self.toolchain)}"
        )
        return "\n".join(lines)
