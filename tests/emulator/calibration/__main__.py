"""Run every case on a device or on the emulator, and store what came out."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from calibration.case import Case
from calibration.records import cases, packed, write
from dsagen.build import Toolchain, find_toolchain
from dsagen.errors import EmulatorError


def cubin_of(case: Case, toolchain: Toolchain) -> bytes:
    """What the case's PTX becomes for sm_90a."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "case.ptx", Path(folder) / "case.cubin"
        source.write_text(case.ptx)
        command = [str(toolchain.nvcc), "-arch=sm_90a", "-cubin", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True)
        return cubin.read_bytes()


def on_device(ordinal: int) -> tuple[str, str, str, Callable[[Case], np.ndarray]]:
    """The device, its driver, the toolkit, and what runs a case there."""
    import torch

    from dsagen.runtime.driver import CudaDriver, LaunchConfig
    from dsagen.runtime.survey import survey_devices

    driver, toolchain = CudaDriver(), find_toolchain()
    home = torch.device("cuda", ordinal)

    def run(case: Case) -> np.ndarray:
        kernel = driver.load_kernel(ordinal, cubin_of(case, toolchain), "k")
        tensors = [torch.from_numpy(array.view(np.uint8).copy()).to(home) for array in case.inputs]
        size = int(np.prod(case.shape)) * np.dtype(case.dtype).itemsize
        tensors.append(torch.zeros(size, dtype=torch.uint8, device=home))
        block = np.frombuffer(struct.pack(f"<{len(tensors)}Q", *(t.data_ptr() for t in tensors)), np.uint8).copy()
        stream = driver.current_stream(ordinal)
        config = LaunchConfig(case.grid, case.threads, 0, stream, overlaps_previous=False)
        driver.make_launch(ordinal, kernel, config, block.ctypes.data)(tensors)
        driver.synchronize(ordinal, stream)
        return tensors[-1].cpu().numpy().view(case.dtype).reshape(case.shape)

    facts = driver.facts(ordinal)
    version = survey_devices().driver or "unknown"
    return facts.name, version, toolchain.version, run


def main(device: str, out: str) -> int:
    """Store the record; how many cases there are goes to stdout."""
    name, driver, toolkit = "emulator", "none", "none"
    run: Callable[[Case], np.ndarray] = Case.run_emulated
    if device != "emulator":
        name, driver, toolkit, run = on_device(int(device))
    rows, declined = {}, 0
    for case in cases():
        try:
            rows[case.name] = packed(case, run(case))
        except EmulatorError:
            if not case.refused:
                raise
            declined += 1
    write(Path(out), name, driver, toolkit, rows)
    print(f"{len(rows)} cases of {name} in {out}, {declined} declined")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m tests.emulator.calibration DEVICE_NUMBER|emulator OUT.json")
    sys.exit(main(*sys.argv[1:]))
