"""PTX of kernels. Compiling them takes longer than what most tests do with it, so that each is compiled once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from dsagen.build import Store, build_units, find_toolchain
from dsagen.build.compile import PTX
from dsagen.build.key import compile_flags
from dsagen.plan import KernelPlan
from dsagen.render import render


def ptx_of(plan: KernelPlan, *, build: bool = True) -> str:
    """PTX of a kernel: kept of an earlier run, or what another test of this run has built, or compiled.

    With `build` it is built as a whole then, since others want it: of tests that run side by side, any may be first.
    """
    unit = render(plan)
    kept = _place(unit.text, unit.arch)
    if not kept.is_file():
        entry = Store.open().lookup(unit)
        if entry is None and build:
            (result,) = build_units([unit], Store.open(), find_toolchain)
            entry = result.entry
        _keep(kept, compile_ptx(unit.text, unit.arch) if entry is None else entry.read(PTX).decode())
    return kept.read_text()


def kept_ptx(text: str, arch: str) -> str:
    """PTX of a CUDA text, compiled unless an earlier run has."""
    kept = _place(text, arch)
    if not kept.is_file():
        _keep(kept, compile_ptx(text, arch))
    return kept.read_text()


def _place(text: str, arch: str) -> Path:
    key = f"{arch}\n{find_toolchain()}\n{compile_flags(arch)}\n{text}"
    folder = Path(tempfile.gettempdir()) / f"dsagen-emulator-{os.getuid()}"
    return folder / f"kernel-{hashlib.sha256(key.encode()).hexdigest()[:24]}.ptx"


def _keep(kept: Path, text: str) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, suffix=".partial", delete=False) as file:
        file.write(text)
    Path(file.name).replace(kept)


def compile_ptx(text: str, arch: str) -> str:
    """PTX of a CUDA text, with the build's flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(text)
        command = [str(find_toolchain().nvcc), *compile_flags(arch).nvcc, str(source), "-o", f"{folder}/kernel.ptx"]
        subprocess.run(command, check=True, capture_output=True)
        return (Path(folder) / "kernel.ptx").read_text()
