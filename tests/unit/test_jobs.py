"""The job count: arithmetic, the knobs, and cgroups of both versions from made-up system folders."""

import os
from pathlib import Path

import pytest

from dsagen.build.jobs import GIB, JobRoom, job_count, measure_room


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_MAX_JOBS", "MAX_JOBS", "DSAGEN_JOB_MEM_GB"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kernels", "cores", "free_gib", "total_gib", "jobs"),
    [
        (100, 8, 64, 64, 8),  # the cores bind
        (3, 8, 64, 64, 3),  # no more jobs than kernels
        (100, 96, 12, 100, 4),  # (12 - 10 reserved) / 0.5
        (100, 96, 3, 4, 4),  # the reserve is 1 GiB at least: (3 - 1) / 0.5
        (100, 96, 0.5, 64, 1),  # below the reserve: one at a time, never none
        (100, 4, 0, 0, 1),  # nothing measurable
    ],
)
def test_the_least_bound_decides(kernels, cores, free_gib, total_gib, jobs):
    assert job_count(kernels, room=JobRoom(cores, int(free_gib * GIB), int(total_gib * GIB))) == jobs


def test_knobs_and_the_explicit_count(monkeypatch):
    room = JobRoom(16, 64 * GIB, 64 * GIB)
    monkeypatch.setenv("DSAGEN_JOB_MEM_GB", "8")
    assert job_count(100, room=room) == 7  # (64 - 6.4) / 8
    monkeypatch.setenv("MAX_JOBS", "5")
    assert job_count(100, room=room) == 5
    monkeypatch.setenv("DSAGEN_MAX_JOBS", "2")
    assert job_count(100, room=room) == 2
    assert job_count(100, requested=20, room=room) == 20
    assert job_count(3, requested=20, room=room) == 3


def _proc(folder: Path, cgroup: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   50331648 kB\n")
    (folder / "self" / "cgroup").write_text(cgroup)
    return folder


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_limits_the_machine_counts(tmp_path):
    room = measure_room(_proc(tmp_path / "proc", "0::/\n"), tmp_path / "cgroup")
    assert room == JobRoom(len(os.sched_getaffinity(0)), 48 * GIB, 64 * GIB)


def test_a_version_2_limit_of_a_parent(tmp_path):
    proc = _proc(tmp_path / "proc", "0::/kube/pod\n")
    top = tmp_path / "cgroup"
    _write(top / "kube" / "pod", memory__max="max\n", memory__current="5\n", cpu__max="max 100000\n")
    stat = f"anon 1\ninactive_file {GIB}\n"
    _write(top / "kube", memory__max=f"{8 * GIB}\n", memory__current=f"{3 * GIB}\n", memory__stat=stat)
    _write(top / "kube", cpu__max="100000 100000\n")
    # File cache that the kernel would give back does not count as used.
    assert measure_room(proc, top) == JobRoom(1, 6 * GIB, 8 * GIB)


def test_a_version_1_limit(tmp_path):
    proc = _proc(tmp_path / "proc", "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n")
    top = tmp_path / "cgroup"
    used = str(4 * GIB)
    _write(top / "memory" / "job", memory__limit_in_bytes=str(4 * GIB), memory__usage_in_bytes=used)
    _write(top / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes=used)
    _write(top / "cpu" / "job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert measure_room(proc, top) == JobRoom(1, 0, 4 * GIB)


def test_a_container_sees_its_limit_at_the_mount(tmp_path):
    proc = _proc(tmp_path / "proc", "0::/path/outside/the/container\n")
    _write(tmp_path / "cgroup", memory__max=str(2 * GIB), memory__current="0")
    assert measure_room(proc, tmp_path / "cgroup").free_bytes == 2 * GIB


def test_this_machine_is_measured():
    room = measure_room()
    assert room.cores >= 1
    assert 0 < room.free_bytes <= room.total_bytes
