"""Looking at compiles while they run: which are at it, for how long, and how much memory their processes take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

_KIB = 1024


@dataclass(frozen=True)
class RunningCompile:
    """One compile that is under way: seconds since it was first seen, and bytes of memory that it holds now."""

    name: str
    seconds: float
    memory_bytes: int


@dataclass
class CompileWatch:
    """What was seen of each compile, by name. Memory is sampled from /proc, and 0 where that does not tell."""

    proc: Path = Path("/proc")
    _since: dict[str, float] = field(default_factory=dict)
    _peaks: dict[str, int] = field(default_factory=dict)

    def look(self, name: str, leader: int) -> RunningCompile:
        """Sample the process `leader` and all below it."""
        now = time.monotonic()
        resident = peak = 0
        for process in self._tree(leader):
            fields = self._status(process)
            resident += fields.get("VmRSS", 0)
            peak = max(peak, fields.get("VmHWM", 0))
        self._peaks[name] = max(self._peaks.get(name, 0), resident, peak)
        return RunningCompile(name, now - self._since.setdefault(name, now), resident)

    def peak_bytes(self, name: str) -> int:
        """The most memory that was seen of a compile; 0 where it ended before it was looked at."""
        return self._peaks.get(name, 0)

    def _tree(self, leader: int) -> list[int]:
        found, left = [], [leader]
        while left:
            process = left.pop()
            found.append(process)
            try:
                text = (self.proc / str(process) / "task" / str(process) / "children").read_text()
            except OSError:  # it has ended, or this kernel does not list children
                continue
            left += [int(word) for word in text.split() if word.isdigit()]
        return found

    def _status(self, process: int) -> dict[str, int]:
        """Fields in bytes of a process's status; none of one that has ended."""
        try:
            text = (self.proc / str(process) / "status").read_text()
        except OSError:
            return {}
        fields = {}
        for line in text.splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
                fields[name] = int(words[0]) * _KIB
        return fields
