"""`dsagen.load`: the kernels of a deployment, and one method per op."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import torch

from dsagen import knobs
from dsagen.arch import arch as arch_row
from dsagen.build.bundle import is_bundle, read_bundle
from dsagen.errors import DeviceError, DsagenError, GuardError, SpecError, StoreError
from dsagen.families.sparse_decode.choice_table import ChoiceTables, read_tables
from dsagen.families.topk.op import Candidate as TopkCandidate
from dsagen.families.topk.op import TopkShape
from dsagen.family import family_of_op
from dsagen.guard import rename, require_int
from dsagen.log import configure_library_logging
from dsagen.matrix import Matrix, expand, require_list
from dsagen.plan import KernelPlan
from dsagen.runtime import torch_ops
from dsagen.runtime.bundled import BundledCode
from dsagen.runtime.cache_ops import CacheOps
from dsagen.runtime.device_kernels import DeviceKernels
from dsagen.runtime.driver import CudaDriver, Driver
from dsagen.runtime.emulated import DEVICE as EMULATOR
from dsagen.runtime.emulated import (
    EmulatorDriver,
    EmulatorOptions,
    emulated_arch,
    read_ptx,
    require_known_device,
    require_options,
)
from dsagen.runtime.handles import register
from dsagen.runtime.index_cache import FORMS as INDEX_FORMS
from dsagen.runtime.index_cache import OP as INDEX_CACHE_OP
from dsagen.runtime.index_cache_ops import IndexCacheOps
from dsagen.runtime.indexer import FORM as LOGITS_FORM
from dsagen.runtime.indexer import OP as LOGITS_OP
from dsagen.runtime.indexer_blocks import FORM as BLOCKS_FORM
from dsagen.runtime.indexer_blocks import METHOD as BLOCKS_METHOD
from dsagen.runtime.indexer_candidates import FORM as CANDIDATES_FORM
from dsagen.runtime.indexer_candidates import METHOD as CANDIDATES_METHOD
from dsagen.runtime.indexer_ragged import FORM as RAGGED_FORM
from dsagen.runtime.indexer_ragged import METHOD as RAGGED_METHOD
from dsagen.runtime.kv_cache import FORMS as CACHE_FORMS
from dsagen.runtime.kv_cache import OP as CACHE_OP
from dsagen.runtime.launch import OpLaunches, OpRoutes
from dsagen.runtime.loader import Loader, ReadCode, device_arch, read_cubins
from dsagen.runtime.plan_cache import PlanCache, PlanKey
from dsagen.runtime.sparse_decode import FORM as DECODE_FORM
from dsagen.runtime.sparse_decode import OP, DecodeBinder, SparseDecodePlan
from dsagen.runtime.step_explaining import StepExplaining
from dsagen.runtime.step_ops import STEP
from dsagen.runtime.topk import FORM as TOPK_FORM
from dsagen.runtime.topk import OP as TOPK_OP
from dsagen.spec import DeploymentSpec, load_spec

Device = int | str | torch.device

# Of the options of `explain` those that calls of an op depend on.
_EXPLAINED: Mapping[str, frozenset[str]] = {
    OP: frozenset({"topk", "extra_topk", "num_splits"}),
    TOPK_OP: frozenset({"topk", "width"}),
    LOGITS_OP: frozenset({"width"}),
    CACHE_OP: frozenset(),
    INDEX_CACHE_OP: frozenset(),
    STEP: frozenset({"topk", "extra_topk", "num_splits", "width"}),
}


def load(
    spec: str | os.PathLike[str] | Mapping[str, Any] | DeploymentSpec,
    *,
    device: Device | None = None,
    archs: Sequence[str] | None = None,
    emulator: EmulatorOptions | None = None,
    name: str | None = None,
) -> Kernels:
    """The kernels of a deployment, compiled for a device where the store lacks them.

    `spec` is a file, a shipped spec's name, a mapping or a DeploymentSpec. `device` (torch's current one by default) is
    where plans are made unless they name another; tensors on other devices are served as well, as far as `archs` (some
    of the spec's; all by default) cover them. The debug knobs (DSAGEN_DEBUG_SYNC,
    DSAGEN_CHECK_INDICES, DSAGEN_POISON_WORKSPACE), DSAGEN_LAUNCHER, DSAGEN_LOG and DSAGEN_LOG_DEST are read here.

    With device="emulator" the same ops run the same kernels' PTX on CPU tensors, slowly and with every access checked,
    as the first of `archs`; `emulator` says how, in place of the DSAGEN_EMULATOR_* variables, which are read here too.

    `spec` may also be a bundle (`dsagen bundle`): its kernels load without a toolkit and without a store, after every
    byte of it was verified; of several specs in it, `name` chooses one. Bundles have no PTX, so no emulator runs them.

    Raises SpecError for a bad spec or one that cannot be built as a whole, KnobError for a bad variable, GuardError
    for a `device` or `emulator` of another kind, DeviceError without a usable GPU or for a device that there is not,
    BuildError when a kernel does not compile (the emulator:
    ToolchainError without g++), StoreError when DSAGEN_NO_JIT is set and a kernel is missing, or where the store
    cannot be written.
    """
    configure_library_logging()
    require_options(emulator)
    require_known_device(device)
    # The emulator launches by itself; what is wrong with the variable is told there as well.
    knobs.LAUNCHER.get()
    if isinstance(spec, str | os.PathLike) and is_bundle(Path(spec)):
        return _load_bundle(Path(spec), name, device, archs, emulator)
    if name is not None:
        raise SpecError(f"name: {name!r} chooses among the specs of a bundle, and {spec!r:.80} is none: leave it out")
    loaded = load_spec(spec)
    if isinstance(device, str) and device == EMULATOR:
        chosen = tuple(cell.arch for cell in expand(loaded, archs).cells)
        driver = partial(EmulatorDriver, emulated_arch(chosen), emulator or EmulatorOptions())
        return Kernels(loaded, archs=archs, open_driver=driver, read=read_ptx)
    if emulator is not None:
        raise GuardError(
            f"[T-12] emulator: options for device={EMULATOR!r}, but device is {device!r}: leave either out"
        )
    return Kernels(loaded, device=device, archs=archs)


def _load_bundle(
    path: Path,
    name: str | None,
    device: Device | None,
    archs: Sequence[str] | None,
    emulator: EmulatorOptions | None,
) -> Kernels:
    if emulator is not None or device == EMULATOR:
        raise StoreError(
            f"{path}: bundles have cubins and no PTX, which the emulator runs: load the spec itself with "
            f"device={EMULATOR!r}"
        )
    bundle = read_bundle(path)
    chosen = bundle.choose(name)
    require_list(archs, chosen.archs)
    absent = [arch for arch in archs or () if arch_row(arch).name not in chosen.archs]
    if absent:
        raise SpecError(f"{path}: packed for {', '.join(chosen.archs)}, not for {absent[0]}: pack it with --arch")
    code = BundledCode.of(bundle, chosen.kernels)
    return Kernels(chosen.spec, device=device, archs=archs or chosen.archs, read=code, select=code.without_absent)


class Kernels(CacheOps, IndexCacheOps, StepExplaining):
    """Kernels of one deployment, made by `dsagen.load`. Safe to use from several threads.

    `open_driver` and `read` are what a test replaces: the driver, and where cubins come from. `select` makes of the
    spec's matrix the one that is loaded.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        *,
        device: Device | None = None,
        archs: Sequence[str] | None = None,
        open_driver: Callable[[], Driver] = CudaDriver,
        read: ReadCode = read_cubins,
        select: Callable[[Matrix], Matrix] = lambda matrix: matrix,
    ) -> None:
        self.spec = spec
        # What is wrong with a spec needs no GPU to be told, so it comes first.
        self._matrix = select(expand(spec, archs))
        self._matrix.require_complete()
        self._archs = tuple(dict.fromkeys(cell.arch for cell in self._matrix.cells))
        self._debug_sync, self._checks_values = knobs.DEBUG_SYNC.get(), knobs.CHECK_INDICES.get()
        self._poisons = knobs.POISON_WORKSPACE.get()
        self._driver = open_driver()
        self._loader = Loader(self._driver, read)
        self._binder = DecodeBinder(spec, self._driver)
        self._topk_launches = OpLaunches(self._driver, TOPK_FORM, self._debug_sync)
        self._cache_launches = {
            role: OpLaunches(self._driver, form, self._debug_sync) for role, form in CACHE_FORMS.items()
        }
        self._index_launches = {
            role: OpLaunches(self._driver, form, self._debug_sync) for role, form in INDEX_FORMS.items()
        }
        self._logits_launches = OpLaunches(self._driver, LOGITS_FORM, self._debug_sync)
        self._ragged_launches = OpLaunches(self._driver, RAGGED_FORM, self._debug_sync)
        self._candidate_launches = OpLaunches(self._driver, CANDIDATES_FORM, self._debug_sync)
        self._block_launches = OpLaunches(self._driver, BLOCKS_FORM, self._debug_sync)
        self._devices: dict[int, DeviceKernels] = {}
        # What calls without a plan share.
        plainly = not (self._debug_sync or self._checks_values or self._poisons)
        self._decode_routes = OpRoutes(self._driver, DECODE_FORM, 1, enabled=plainly)
        self._tables, self._texts = read_tables() if OP in spec.ops else ChoiceTables(), {}
        self._launches = knobs.SPARSE_DECODE_LAUNCHES.get()
        self._fitting: dict[tuple[str, int, int], bool] = {}
        self._plans: PlanCache[PlanKey, SparseDecodePlan] = PlanCache(dropped=self._decode_routes.forget)
        self._topk_routes = OpRoutes(self._driver, TOPK_FORM, 0, enabled=not (self._debug_sync or self._checks_values))
        self._topk_plans = PlanCache(dropped=self._topk_routes.forget)
        self._step_plans = PlanCache()
        self._topk_choices: dict[tuple[int, TopkShape], TopkCandidate] = {}
        self._topk_clusters, self._topk_cluster = {}, knobs.TOPK_CLUSTER.get()
        self._lock = threading.RLock()
        self._default = self._driver.current_device() if device is None else self._ordinal(device)
        self._loader.fetch(self._on(self._default).plans)
        # What the ops of torch know these kernels by; see torch_ops.
        self.handle = register(self, self._archs, type(self._driver).__name__, torch_ops.SCHEMAS)
        torch_ops.ENTRANCES.serve(self, self.handle, self.device.type.upper(), self._op_tables())

    def _op_tables(self) -> dict[str, Any]:
        """Where the launcher in C finds calls of torch's ops that are like one before; None where each is checked."""
        launches = {LOGITS_OP: self._logits_launches, RAGGED_METHOD: self._ragged_launches}
        launches |= {CANDIDATES_METHOD: self._candidate_launches, BLOCKS_METHOD: self._block_launches}
        launches |= {f"kv_{role}": launches for role, launches in self._cache_launches.items()}
        launches |= {f"index_{role}": launches for role, launches in self._index_launches.items()}
        tables = {op: None if self._checks_values else of_op.table for op, of_op in launches.items()}
        found = (self._topk_launches.table, self._topk_routes.table)
        tables[TOPK_OP] = None if self._checks_values else tuple(table for table in found if table is not None) or None
        return {**tables, **dict.fromkeys((OP, f"{OP}_caches"), self._decode_routes.table)}

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise DsagenError(
            "Kernels hold code that is loaded in this process, so they are neither copied nor pickled: call "
            "dsagen.load where they are needed"
        )

    @property
    def device(self) -> torch.device:
        """Where plans are made unless they name another device."""
        return self._driver.torch_device(self._default)

    @property
    def sm_count(self) -> int:
        """Multiprocessors of `device`, which calls are shared among."""
        return self._on(self._default).facts.sm_count

    def prepare(self, devices: Iterable[Device] | None = None) -> None:
        """Compile and load every kernel of the deployment on the given devices (default: `device`).

        After that no launch on them compiles or loads anything. FrozenError after freeze() or during graph capture.
        """
        if isinstance(devices, str) or not isinstance(devices, Iterable | None):
            raise DeviceError(f"devices: expected a list of devices such as [0, 'cuda:1'], found {devices!r}")
        for ordinal in [self._default] if devices is None else [self._ordinal(device) for device in devices]:
            kernels = self._on(ordinal)
            self._loader.fetch(kernels.plans)
            for plan in kernels.plans:
                self._loader.load(plan, ordinal)

    def freeze(self) -> None:
        """From now on needing a kernel that is not loaded is a FrozenError instead of a compile or a load."""
        self._loader.freeze()

    def explain(
        self,
        op: str = OP,
        *,
        batch: int,
        s_q: int = 1,
        topk: int | None = None,
        extra_topk: int | None = None,
        num_splits: int | None = None,
        width: int | None = None,
        device: Device | None = None,
    ) -> str:
        """Which kernel a call of that shape takes and why: guards of each candidate, partition, workspace.

        Of sparse decode, `topk` and `extra_topk` are the capacities of the spec unless given.

        A call of topk has batch x s_q rows of `width` scores and `topk` slots in each, one of indexer_logits s_q tokens
        of each request that see up to `width` keys, one of kv_cache or index_cache batch x s_q rows; they have no
        splits. Of "decode_step", with a `width` as of indexer_logits, all stages are explained; `topk` is what it
        selects, or with a second cache the width of the window, and `extra_topk` what it selects.
        """
        if not isinstance(op, str) or op not in _EXPLAINED:
            raise GuardError(f"[T-11] op: {op!r:.200} is no op: expected one of {', '.join(_EXPLAINED)}")
        if op != STEP:
            self._require_op(op)
        given = {"topk": topk, "extra_topk": extra_topk, "num_splits": num_splits, "width": width}
        self._require_explained(op, [name for name, value in given.items() if value is not None])
        kernels = self._on(self._ordinal(device))
        head = self._explained_head(op, kernels)
        if op == STEP:
            sizes = require_int("batch", batch), require_int("s_q", s_q), _required_width(op, width)
            k, window = (topk, None) if self.spec.extra_kv is None else (extra_topk, topk)
            try:
                text = self._explain_step(kernels, sizes, k, window, num_splits)
            except GuardError as error:
                selected = "topk" if self.spec.extra_kv is None else "extra_topk"
                names = {"next_n": "s_q", "batch, next_n": "batch, s_q", "max_seq_len": "width", "k": selected}
                names["window"] = "topk"
                raise rename(error, names) from None
            return f"{head}\n{text}"
        if op in (CACHE_OP, INDEX_CACHE_OP):
            rows = require_int("batch", batch) * require_int("s_q", s_q)
            explain_rows = self._explain_rows if op == CACHE_OP else self._explain_keys
            return f"{head}\n{explain_rows(kernels.ordinal, rows)}"
        if op == LOGITS_OP:
            tokens = require_int("batch", batch), require_int("s_q", s_q)
            return f"{head}\n{self._explain_logits(kernels.ordinal, *tokens, _required_width(op, width))}"
        if op == TOPK_OP:
            capacity = self.spec.most_selected
            slots = self.spec.selected_topk if topk is None else require_int("topk", topk)
            columns = _required_width(op, width)
            rows = require_int("batch", batch) * require_int("s_q", s_q)
            wanted = TopkShape(rows, columns, slots, capacity)
            return f"{head}\n{self._explain_topk(kernels, wanted)}"
        if extra_topk is None:
            extra_topk = self.spec.extra_topk
        widths = batch, s_q, self.spec.topk if topk is None else topk, extra_topk
        return f"{head}\n{self._explain_decode(kernels, widths, num_splits)}"

    def _require_explained(self, op: str, given: Sequence[str]) -> None:
        """Refuse what a call of the op does not have."""
        known = _EXPLAINED[op]
        if op == STEP and self.spec.extra_kv is None:
            known = known - {"extra_topk"}
        for name in given:
            if name not in known:
                raise GuardError(f"[T-16] {name}: nothing that a call of {op} takes depends on it: leave it out")

    def _refuse_capture(self, ordinal: int) -> None:
        if self._driver.is_capturing(ordinal):
            raise GuardError(
                "[T-13] DSAGEN_CHECK_INDICES: checking waits for the device, which CUDA graph capture does not allow: "
                "unset it"
            )

    def _require_op(self, op: str) -> None:
        if op not in self.spec.ops:
            raise GuardError(
                f"[T-11] {op}: the spec {self.spec.name} declares ops {', '.join(self.spec.ops)}: add it there"
            )

    def _on(self, ordinal: int) -> DeviceKernels:
        """The deployment's kernels for a device; DeviceError when its arch is not among them."""
        found = self._devices.get(ordinal)
        if found is None:
            facts = self._driver.facts(ordinal)
            row = device_arch(facts, ordinal, self.spec.name, self._archs)
            by_role: dict[tuple[str, str], tuple[KernelPlan, ...]] = {}
            for cell in self._matrix.cells:
                if cell.arch == row.name and cell.variant is not None:
                    plan = family_of_op(cell.op).plan(cell.variant)
                    by_role[cell.op, cell.role] = (*by_role.get((cell.op, cell.role), ()), plan)
            found = self._devices[ordinal] = DeviceKernels(ordinal, facts, row.name, by_role)
        return found

    def _ordinal(self, device: Device | None) -> int:
        if device is None:
            return self._default
        ordinal, count = self._find_ordinal(device), self._driver.device_count()
        if ordinal is None or not 0 <= ordinal < count:
            raise DeviceError(f"device {device!r}: expected {self._driver.known_devices()}")
        return ordinal

    def _find_ordinal(self, device: Device) -> int | None:
        if isinstance(device, int):
            return None if isinstance(device, bool) else device
        try:
            named = torch.device("cpu" if isinstance(device, str) and device == EMULATOR else device)
        except (RuntimeError, TypeError):
            return None
        if named.type == "cuda" and named.index is None:
            return self._driver.current_device()
        return self._driver.ordinal(named)


def _required_width(op: str, width: int | None) -> int:
    if width is None:
        raise GuardError(f"[T-16] width: missing, and what a call of {op} takes depends on it: pass it")
    return require_int("width", width)
