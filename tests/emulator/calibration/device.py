"""Cases on a CUDA device: compiled side by side, run in child processes, since a fault ends what one can do there.

A child is told the cases and where their cubins are, and answers a line at a time: which case it begins, and what came
out. Where one faults, hangs or takes the process with it, that is its result, and another child goes on behind it.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from calibration import maps
from calibration.case import Case
from calibration.records import cases, packed
from dsagen.build import Toolchain

Row = dict[str, Any]
# How long a child may take for one case, or to start. Torch alone takes some seconds.
PATIENCE_SECONDS = 120.0
# Each start of one takes some seconds of a device that others may wait for.
MOST_CHILDREN = 40
MAPS = "tensor maps"
_ROOT = Path(__file__).parents[3]


@dataclass
class Outcome:
    """Rows of what ran, errors of what did not, by case; what was said of tensor maps and of the device."""

    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    maps: dict[str, Row] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)


def cubin_of(case: Case, toolchain: Toolchain) -> bytes:
    """What the case's PTX becomes for sm_90a. CalledProcessError with ptxas's words where it declines."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "case.ptx", Path(folder) / "case.cubin"
        source.write_text(case.ptx)
        command = [str(toolchain.nvcc), "-arch=sm_90a", "-cubin", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return cubin.read_bytes()


def compile_all(wanted: Sequence[Case], toolchain: Toolchain, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The files of the cubins by case, and why there is none of others."""
    files: dict[str, str] = {}
    failed: dict[str, str] = {}

    def compile_one(numbered: tuple[int, Case]) -> None:
        number, case = numbered
        try:
            path = folder / f"{number}.cubin"
            path.write_bytes(cubin_of(case, toolchain))
            files[case.name] = str(path)
        except subprocess.CalledProcessError as error:
            failed[case.name] = f"does not compile: {' '.join(str(error.stderr).split())[:500]}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, enumerate(wanted)))
    return files, failed


# ---- the parent -----------------------------------------------------------------------------------------------------


def run_in_children(
    command: Sequence[str], tasks: dict[str, str], outcome: Outcome, patience: float = PATIENCE_SECONDS
) -> None:
    """Have children that the command starts do all tasks (a case's name, its cubin), whatever becomes of them."""
    left = dict(tasks)
    fruitless = 0
    for _ in range(MOST_CHILDREN):
        if not left:
            return
        before = len(left)
        with tempfile.TemporaryFile("w+") as errors:
            begun, why = _run_child(command, left, outcome, errors, patience)
            errors.seek(0)
            words = " ".join(errors.read().split())[-500:]
        if begun in left:
            outcome.failed[begun] = f"{why}: {words}" if words else why
            del left[begun]
        fruitless = fruitless + 1 if len(left) == before else 0
        if fruitless == 2:
            # Two children in turn that did not come to any case: no other would.
            outcome.failed |= dict.fromkeys(left, f"not begun: {why}: {words}")
            return
    outcome.failed |= dict.fromkeys(left, f"not begun: {MOST_CHILDREN} children have ended on the way")


def _run_child(
    command: Sequence[str], left: dict[str, str], outcome: Outcome, errors: IO[str], patience: float
) -> tuple[str, str]:
    """One child; takes what it has done off `left`. The case that it was at when it ended, and how it did."""
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT
    )
    assert child.stdin is not None and child.stdout is not None
    begun, why = "", ""
    try:
        child.stdin.write(json.dumps(left))
        child.stdin.close()
    except OSError as error:
        why = f"the child took no tasks ({error})"
    for message in _messages(child.stdout, patience):
        if message is None:
            why = f"nothing came for {patience:g} s"
            break
        if "begin" in message:
            begun = message["begin"]
            continue
        _take(message, left, outcome)
        begun = ""
    if why:
        child.kill()
    try:
        why = why or f"the child ended with code {child.wait(patience)}"
        child.wait(patience)
    except subprocess.TimeoutExpired:
        # What a device holds up may not even be killed: it is left behind.
        child.kill()
        why = f"{why or 'all was said'}, and the child does not end"
    return begun, why


def _take(message: dict[str, Any], left: dict[str, str], outcome: Outcome) -> None:
    outcome.about |= message.get("about", {})
    outcome.maps |= message.get("maps", {})
    name = message.get("case", "")
    if "row" in message:
        outcome.rows[name] = message["row"]
    elif "error" in message:
        outcome.failed[name] = message["error"]
    left.pop(name, None)


def _messages(stream: IO[str], patience: float) -> Iterator[dict[str, Any] | None]:
    """What a child says, to its end; None once nothing has come for too long. Other lines are skipped."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


# ---- the child ------------------------------------------------------------------------------------------------------


class Arguments:
    """A launch's parameters, and the array of pointers to them that the driver takes. Keep it until it has run."""

    def __init__(self, addresses: Sequence[int], tensor_map: bytes = b"") -> None:
        values = [*([tensor_map] if tensor_map else []), *(struct.pack("<Q", address) for address in addresses)]
        self._kept = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(buffer) for buffer in self._kept))
        self.address = ctypes.addressof(self._pointers)


class Device:
    """One CUDA device, by the driver that kernels of a spec use as well."""

    def __init__(self, ordinal: int, driver: Any, cuda: Any) -> None:
        import torch

        self._torch, self._cuda, self._ordinal = torch, cuda, ordinal
        self._driver, self._home = driver, driver.torch_device(ordinal)

    @staticmethod
    def open(ordinal: int) -> Device:
        from cuda.bindings import driver as cuda

        from dsagen.runtime.driver import CudaDriver

        # What is compiled for faster launches is no matter here.
        return Device(ordinal, CudaDriver("python"), cuda)

    def about(self) -> dict[str, str]:
        from dsagen.runtime.survey import survey_devices

        return {"device": self._driver.facts(self._ordinal).name, "driver": survey_devices().driver or "unknown"}

    def maps(self) -> dict[str, Row]:
        return maps.survey(ctypes.CDLL("libcuda.so.1"), self._cuda)

    def run(self, case: Case, cubin: bytes) -> np.ndarray:
        """The output; whatever the driver answers is raised."""
        from dsagen.runtime.driver import LaunchConfig

        driver, ordinal = self._driver, self._ordinal
        kernel = driver.load_kernel(ordinal, cubin, "k")
        tensors = [self._on_device(array) for array in case.arrays()]
        tensor_map = case.tensor_map([tensor.data_ptr() for tensor in tensors])
        encoded = b"" if tensor_map is None else tensor_map.encode(self._cuda)
        arguments = Arguments([tensor.data_ptr() for tensor in tensors], encoded)
        stream = driver.current_stream(ordinal)
        config = LaunchConfig(case.grid, case.threads, 0, stream, overlaps_previous=False, cluster=case.cluster)
        driver.make_launch(ordinal, kernel, config, arguments.address)(tensors)
        driver.synchronize(ordinal, stream)
        out: np.ndarray = tensors[-1].cpu().numpy()
        return out.view(case.dtype).reshape(case.shape)

    def _on_device(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8)).to(self._home)

    def is_usable(self) -> bool:
        """Whether anything can still run; after some faults nothing can in this process."""
        try:
            self._torch.cuda.synchronize(self._home)
            self._torch.zeros(1, device=self._home).cpu()
        except RuntimeError:
            return False
        return True


class Emulated:
    """The emulator in the place of a device, which has no use for cubins."""

    def about(self) -> dict[str, str]:
        return {"device": "emulator", "driver": "none"}

    def maps(self) -> dict[str, Row]:
        return {}

    def run(self, case: Case, cubin: bytes) -> np.ndarray:
        return case.run_emulated()

    def is_usable(self) -> bool:
        return True


def _guarded(name: str, say: Callable[[dict[str, Any]], None], what: Callable[[], dict[str, Any]]) -> bool:
    """Says that it begins, and what came out; False where that is an error."""
    say({"begin": name})
    try:
        found = what()
    except Exception as error:
        # Whatever it is, it is what the record tells of this case.
        say({"case": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
        return False
    say({"case": name, **found})
    return True


def serve(device: str, tasks: IO[str], answers: IO[str]) -> None:
    """What a child does: every task that it is given, until one leaves the device unusable."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    known = {case.name: case for case in cases()}
    machine = Emulated() if device == "emulator" else Device.open(int(device))
    say({"about": machine.about()})
    for name, path in json.load(tasks).items():

        def work(name: str = name, path: str = path) -> dict[str, Any]:
            if name == MAPS:
                return {"maps": machine.maps()}
            cubin = Path(path).read_bytes() if path else b""
            return {"row": packed(known[name], machine.run(known[name], cubin))}

        if not _guarded(name, say, work) and not machine.is_usable():
            return


def child_command(device: str) -> list[str]:
    return [sys.executable, "-m", "tests.emulator.calibration", "--child", device]


def record(device: str, wanted: Sequence[Case], toolchain: Toolchain) -> Outcome:
    """Run cases on a device, each in a child that may fail."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        files, outcome.failed = compile_all(wanted, toolchain, Path(folder))
        ordered = {case.name: files[case.name] for case in wanted if case.name in files}
        run_in_children(child_command(device), {MAPS: "", **ordered}, outcome)
    return outcome
