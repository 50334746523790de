"""Micro-kernels whose results on silicon are kept, so that the emulator can be held to them.

`python -m tests.emulator.calibration DEVICE OUT.json`, from the root of the repository, runs every case and stores what
came out: DEVICE is `emulator`, or the number of a CUDA device, for which ptxas makes a cubin of the same PTX. It needs
numpy, nvcc, torch and cuda-python there. Cases run in child processes, and what fails is recorded as failed; so is,
with `--seconds`, what has not begun by then. `compare OUT.json` prints what the emulator says otherwise. Files of
devices belong into `golden/`, and tests/emulator/test_calibration.py compares the emulator with each. A case whose text
or inputs have changed since is no longer held to the record, and has to be recorded anew.
"""
