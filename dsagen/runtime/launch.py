"""Launches of an op's kernels: by the launcher in C, which repeats known calls by itself, or by cuda-python."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from dsagen.errors import DeviceError, DsagenError
from dsagen.runtime.blocks import ArgumentBlock, BlockLayout, Number
from dsagen.runtime.driver import Driver, DriverError, LaunchConfig, Operands, PointerField
from dsagen.runtime.loader import LoadedKernel
from dsagen.runtime.tensors import span_bytes

# Launches kept ready; a serving process has a handful of batch sizes.
_MAX_LAUNCHES = 64
# Calls that the launcher in C remembers, for each op or plan. Past it, it begins anew.
_MAX_CALLS = 256


@dataclass(frozen=True)
class CallForm:
    """What makes two calls of an op alike, and where the addresses of their arguments come from.

    A call is its `tensors` in this order, of which the first is always given, and then so many `scalars`, from which
    all arguments follow. `outputs` are those tensors that the kernels write. `addresses` gives for a pointer of the
    argument block the tensor that it leads into, of several names the first that the call brings; how far into it
    follows from the call as well. `held` are pointers into memory of a plan.
    """

    op: str
    tensors: tuple[str, ...]
    outputs: frozenset[str]
    scalars: int
    addresses: Mapping[str, str | tuple[str, ...]]
    held: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Step:
    """One kernel of a call, with its grid in CTAs, and how many of those are a cluster.

    Without `overlaps` it begins when the kernel before it has ended, also where it waits for that one by itself.
    """

    kernel: LoadedKernel
    grid: int
    cluster: int = 1
    overlaps: bool = True


class KernelLaunch:
    """A kernel with its argument block, ready to launch again and again on one stream."""

    def __init__(
        self,
        driver: Driver,
        op: str,
        step: Step,
        stream: int,
        block: ArgumentBlock,
        debug_sync: bool,
    ) -> None:
        kernel = step.kernel
        self._driver, self._op, self._kernel = driver, op, kernel
        self._block, self._debug_sync = block, debug_sync
        self._config = launch_config(step, stream)
        self.prepared = driver.make_launch(kernel.ordinal, kernel.handle, self._config, block)

    def __call__(self, values: Mapping[str, Number], operands: Operands) -> None:
        """Write the arguments and launch; DeviceError names op, kernel and arguments when the driver refuses.

        `operands` are the tensors that the arguments point into.
        """
        self._block.write(values)
        try:
            self.prepared(operands)
            if self._debug_sync:
                self._wait()
        except DriverError as error:
            text = failure_text(self._op, self._kernel, self._config, self._block.read(), error, self._debug_sync)
            raise DeviceError(text) from None

    def _wait(self) -> None:
        # Nothing runs while a graph is captured, so there is nothing to wait for.
        if not self._driver.is_capturing(self._kernel.ordinal):
            self._driver.synchronize(self._kernel.ordinal, self._config.stream)


class OpLaunches:
    """Launches an op's kernels, all of one call together. Safe to use from several threads.

    `repeat(*tensors, *scalars)` launches a call again that is like one that was launched before, and says whether it
    did: what it does not know, or what looks odd, it leaves to the checks of `launch`'s caller. Where a call leaves
    outputs to the op, `repeat` allocates each by itself with `torch.empty_like`, and returns all outputs in the order
    of the form in place of True. It is the launcher's own function, so it costs no Python. With `repeats` False it
    never launches. `failed` is called before the launcher in C raises for a call, of which some kernels may have run.
    """

    repeat: Callable[..., Any]

    def __init__(
        self,
        driver: Driver,
        form: CallForm,
        debug_sync: bool,
        repeats: bool = True,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver, self._form, self._debug_sync, self._failed = driver, form, debug_sync, failed
        self._launches: OrderedDict[tuple[str, int, int, int, bool, int], KernelLaunch] = OrderedDict()
        self._layouts: dict[str, BlockLayout] = {}
        self._lock = threading.Lock()
        # The debug knob waits between kernels, which the launcher in C does not.
        launcher = None if debug_sync else driver.launcher()
        self._calls = None if launcher is None else launcher.calls(*_call_sizes(form), _MAX_CALLS, self._raise_failure)
        self._output_places = [place for place, name in enumerate(form.tensors) if name in form.outputs]
        # What `repeat` looks in, None where it has nothing to look in.
        self.table = self._calls if repeats else None
        self.repeat = _never if self.table is None else self.table.repeat

    def __len__(self) -> int:
        """Launches that are kept ready."""
        return len(self._launches) if self._calls is None else len(self._calls)

    def prepared(self) -> list[Callable[[Operands], None]]:
        """What the driver has been made ready to launch, for measuring it alone; none with a launcher in C.

        They keep their arguments, and none of the memory that these lead to.
        """
        return [launch.prepared for launch in self._launches.values()]

    def hold_stream(self, stream: int | None) -> None:
        """Repeat calls on this stream only; for None on no stream at all."""
        if self._calls is not None:
            self._calls.hold_stream(stream)

    def reserve(self, workspace: torch.Tensor) -> None:
        """Repeat no call with a tensor that reaches into this memory."""
        if self._calls is not None:
            first = workspace.data_ptr()
            self._calls.reserve(first, first + workspace.numel() * workspace.element_size())

    def launch(
        self,
        steps: Sequence[Step],
        stream: int,
        values: Mapping[str, Number],
        operands: Operands,
        call: tuple[Any, ...],
        asked: tuple[Any, ...] | None = None,
    ) -> None:
        """Run an op's kernels one after the other on a stream.

        `operands` are the tensors of the call and its plan. `call` is its tensors and scalars, with all outputs, and
        `asked`, which `repeat` takes for a call like this one, is the same without those that were made for it.
        DeviceError names op, kernel and arguments when the driver refuses.
        """
        asked = call if asked is None else asked
        # The lock covers the launches too: until then the arguments lie in a launch's own block, and another thread's
        # kernel must not come between two that share a workspace.
        with self._lock:
            if self._calls is None:
                for step in steps:
                    self._ready(step, stream)(values, operands)
                return
            chosen = tuple(steps)
            launches = tuple(self._describe(step, values, call) for step in chosen)
            context = self._driver.handles(chosen[0].kernel.ordinal, chosen[0].kernel.handle)[1]
            self._calls.launch(stream, context, launches, chosen)
            self._calls.remember(asked, context, launches, chosen, partial(self._hollow_outputs, call, asked))

    def _hollow_outputs(
        self, call: tuple[Any, ...], asked: tuple[Any, ...]
    ) -> tuple[tuple[int, torch.Tensor], ...] | None:
        """Of each output that was made for a call: its place, and what later ones are to be like.

        None where one cannot be had: for want of memory, under a mode of torch, or since rows lie apart.
        """
        places = [place for place in self._output_places if asked[place] is None and call[place] is not None]
        try:
            hollow = [torch.empty_like(call[place]) for place in places]
        except RuntimeError:
            return None
        for place, tensor in zip(places, hollow, strict=True):
            # Strides are among the arguments that a repeated call has from this one.
            if type(tensor) is not torch.Tensor or tensor.stride() != call[place].stride():
                return None
            # Of it only size, strides, dtype and device are taken, so it needs no memory.
            tensor.untyped_storage().resize_(0)
        return tuple(zip(places, hollow, strict=True))

    def _describe(self, step: Step, values: Mapping[str, Number], call: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the launcher takes for a kernel: handle, configuration, block, and which of its bytes are addresses."""
        plan = step.kernel.plan
        config = launch_config(step, 0)
        layout = self._layouts.get(plan.slug)
        if layout is None:
            layout = self._layouts[plan.slug] = BlockLayout(plan)
        function, _ = self._driver.handles(step.kernel.ordinal, step.kernel.handle)
        block = layout.pack(values)
        addresses = tuple(self._addresses(plan.slug, config.pointers, values, call))
        extents = config.grid, config.threads, config.smem_bytes
        return function, *extents, config.overlaps_previous, config.cluster, block, addresses

    def _addresses(
        self, slug: str, pointers: Sequence[PointerField], values: Mapping[str, Number], call: tuple[Any, ...]
    ) -> list[tuple[int, int, int]]:
        """Of each address that changes from call to call: offset in the block, place of the tensor, bytes into it."""
        found = []
        for pointer in pointers:
            if pointer.name in self._form.held:
                continue
            place = self._place(slug, pointer.name, call)
            tensor = None if place is None else call[place]
            # What is left out or empty has no address, and its call says so.
            if tensor is None or not tensor.numel():
                continue
            distance = int(values[pointer.name]) - tensor.data_ptr()
            if not 0 <= distance < span_bytes(tensor):
                name = self._form.tensors[place or 0]
                raise DsagenError(f"{slug}: its parameter {pointer.name!r} does not lead into {name}")
            found.append((pointer.offset_bytes, place or 0, distance))
        return found

    def _place(self, slug: str, pointer: str, call: tuple[Any, ...]) -> int | None:
        """Place in a call of the tensor that a pointer leads into, None where the call does not bring it."""
        form = self._form
        if pointer not in form.addresses:
            raise DsagenError(f"{slug}: no tensor of {form.op} is named for its parameter {pointer!r}")
        sources = form.addresses[pointer]
        places = [form.tensors.index(name) for name in ((sources,) if isinstance(sources, str) else sources)]
        return next((place for place in places if call[place] is not None), None)

    def _ready(self, step: Step, stream: int) -> KernelLaunch:
        kernel = step.kernel
        key = (kernel.plan.slug, kernel.ordinal, step.grid, step.cluster, step.overlaps, stream)
        launch = self._launches.get(key)
        if launch is None:
            block = ArgumentBlock(kernel.plan)
            op, debug_sync = self._form.op, self._debug_sync
            launch = KernelLaunch(self._driver, op, step, stream, block, debug_sync)
            self._launches[key] = launch
            if len(self._launches) > _MAX_LAUNCHES:
                self._launches.popitem(last=False)
        self._launches.move_to_end(key)
        return launch

    def _raise_failure(self, code: int, index: int, block: bytes, stream: int, steps: Sequence[Step]) -> NoReturn:
        self._failed()
        error = self._driver.error_of("cuLaunchKernelEx" if index >= 0 else "the launch's context", code)
        step = steps[max(index, 0)]
        values = BlockLayout(step.kernel.plan).unpack(block) if block else {}
        raise DeviceError(
            failure_text(self._form.op, step.kernel, launch_config(step, stream), values, error, debug_sync=False)
        )


class OpRoutes:
    """Which plan serves an op's calls that name none: kept for calls that were checked before, on their stream.

    `repeat(*tensors, *scalars, *choices)` is as that of OpLaunches; `choices` tell plans of one shape apart. A call
    that is being captured is left to the checks. Routes hold their plans until `forget`.
    """

    repeat: Callable[..., Any]

    def __init__(self, driver: Driver, form: CallForm, choices: int, enabled: bool) -> None:
        launcher = driver.launcher() if enabled else None
        sizes = (len(form.tensors), form.scalars, choices, _MAX_CALLS)
        self.table = None if launcher is None else launcher.routes(*sizes)
        self.repeat = _never if self.table is None else self.table.repeat

    def add(self, call: tuple[Any, ...], launches: OpLaunches, plan: object) -> None:
        """Let a plan, whose `launches` these are, serve calls like this one on the current stream, as it has done."""
        if self.table is not None and launches.table is not None:
            self.table.add(call, launches.table, plan)

    def forget(self) -> None:
        """Let go of all plans."""
        if self.table is not None:
            self.table.forget()


def launch_config(step: Step, stream: int) -> LaunchConfig:
    """The launch of a step."""
    plan = step.kernel.plan
    pointers = tuple(
        PointerField(field.name, field.offset_bytes, not field.target.startswith("const "), field.kept)
        for field in plan.params
        if field.ctype == "pointer"
    )
    extents = step.grid, plan.threads, plan.smem_bytes
    return LaunchConfig(*extents, stream, plan.overlaps_previous and step.overlaps, pointers, step.cluster)


def failure_text(
    op: str,
    kernel: LoadedKernel,
    config: LaunchConfig,
    values: Mapping[str, Any],
    error: DriverError,
    debug_sync: bool,
) -> str:
    """What is said of a launch that the driver refuses."""
    hint = "" if debug_sync else ". An earlier kernel may be the cause: DSAGEN_DEBUG_SYNC=1 waits after each launch"
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{op}: {kernel.plan.slug} failed on device {kernel.ordinal}: {error} ({config}; {arguments}){hint}"


def _never(*_: object) -> bool:
    """Without a launcher in C every call takes the way through the checks."""
    return False


def _call_sizes(form: CallForm) -> tuple[int, int, int]:
    outputs = sum(1 << place for place, name in enumerate(form.tensors) if name in form.outputs)
    return len(form.tensors), form.scalars, outputs
