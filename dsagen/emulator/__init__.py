"""PTX on the CPU: runs what nvcc emits, with bounds, initialisation, barrier and deadlock checks. See README.md."""

from dsagen.emulator.launch import Counts, coverage, launch
from dsagen.emulator.memory import Memory
from dsagen.emulator.session import Lanes, Session

# The name of the emulator among devices: what load, check and evidence call it.
DEVICE = "emulator"

__all__ = ["DEVICE", "Counts", "Lanes", "Memory", "Session", "coverage", "launch"]
