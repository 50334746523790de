"""How many compile jobs this machine carries: usable cores, and the memory that is free for this process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsagen import knobs

GIB = 1 << 30
# What stays untouched for everything else on the machine: a share of the memory, at least this much.
RESERVE_BYTES = 1 * GIB
RESERVE_SHARE = 0.10


@dataclass(frozen=True)
class JobRoom:
    """The facts that bound the job count: usable cores, memory in bytes that is free, and the total it is part of."""

    cores: int
    free_bytes: int
    total_bytes: int


def job_count(kernels: int, requested: int | None = None, room: JobRoom | None = None) -> int:
    """Jobs for `kernels` compiles, at least 1.

    `requested` (the -j of the command line) is taken as given. Without it: the least of the usable cores, what the free
    memory less a reserve carries at DSAGEN_JOB_MEM_GB each, and DSAGEN_MAX_JOBS.
    """
    if requested is not None:
        return max(1, min(requested, kernels))
    room = room or measure_room()
    reserve = max(RESERVE_BYTES, int(room.total_bytes * RESERVE_SHARE))
    by_memory = int((room.free_bytes - reserve) // (knobs.JOB_MEM_GB.get() * GIB))
    bounds = [kernels, room.cores, by_memory, knobs.MAX_JOBS.get() or room.cores]
    return max(1, min(bounds))


def measure_room(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> JobRoom:
    """Cores of this process's affinity and CPU quota; free memory of the machine and of every enclosing cgroup."""
    memory = _meminfo(proc / "meminfo")
    free, total = memory.get("MemAvailable", 0), memory.get("MemTotal", 0)
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc / "self" / "cgroup", cgroup):
        limit, used = _memory_limit(folder)
        if limit is not None and limit < memory.get("MemTotal", limit):
            free, total = min(free, max(0, limit - used)), min(total, limit)
        quota = _cpu_quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return JobRoom(cores, free, total)


def _meminfo(path: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes; empty where it cannot be read."""
    fields = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return fields


def _cgroup_folders(listing: Path, mount: Path) -> list[Path]:
    """The folders, leaf to root, of this process's memory and cpu cgroups, of version 2 and of version 1."""
    folders = []
    for line in _read(listing).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller not in ("", "memory", "cpu"):
                continue
            top = mount / controller if controller else mount
            leaf = top / path.strip("/")
            # In a container the listed path may not exist below the mount; its nearest ancestor then speaks for it.
            folders += [folder for folder in (leaf, *leaf.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return folders


def _memory_limit(folder: Path) -> tuple[int | None, int]:
    """(limit, used without reclaimable file cache) in bytes; limit None where the folder sets none."""
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            return int(limit), max(0, int(used) - _inactive_file_bytes(folder))
    return None, 0


def _inactive_file_bytes(folder: Path) -> int:
    names = ("inactive_file", "total_inactive_file")
    found = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return max((int(found[name]) for name in names if found.get(name, "").isdigit()), default=0)


def _cpu_quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
