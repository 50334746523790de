"""Building: concurrency, killed builders, failures and their texts, progress, and real compiles where nvcc exists."""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolchain import GOOD_LOG, FakeUnit, build_in_process, compiles, install_kit, write_toolchain

from dsagen import knobs
from dsagen.build import Store, build_units, find_toolchain, make_progress, write_generated
from dsagen.build.key import entry_key, entry_name, source_key
from dsagen.build.progress import LineProgress, LiveProgress, QuietProgress
from dsagen.errors import BuildError, ToolchainError

UNIT = FakeUnit()
MACHINE_PATH = os.environ.get("PATH", "")


@pytest.fixture(autouse=True)
def kit(monkeypatch, tmp_path):
    return install_kit(monkeypatch, tmp_path)


def units(count):
    return [replace(UNIT, slug=f"fake.sm90a.n{number}", text=f"// {number}\n") for number in range(count)]


def name_of(unit):
    return entry_name(unit.slug, entry_key(source_key(unit), find_toolchain().version))


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.01)


class Recorder(QuietProgress):
    def __init__(self):
        self.events = []

    def begin(self, kernels, jobs):
        self.events.append(("begin", kernels, jobs))

    def finish(self, name, seconds, failure, memory_bytes):
        self.events.append(("finish", name, failure is None))

    def wait(self, name):
        self.events.append(("wait", name))

    def end(self):
        self.events.append(("end",))


# Concurrency ----------------------------------------------------------------------------------------------------------


def test_eight_processes_compile_one_cold_spec_once(kit):
    write_toolchain(kit, before_nvcc="sleep 0.5")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        results = [future.result() for future in [pool.submit(build_in_process, units(3)) for _ in range(8)]]
    assert compiles(kit) == 3
    assert len({tuple(name for name, _ in result) for result in results}) == 1
    # Each of the three was compiled by exactly one of the eight.
    assert [sum(not cached for _, cached in column) for column in zip(*results, strict=True)] == [1, 1, 1]


def test_a_busy_entry_does_not_hold_up_the_others(kit):
    busy, free = units(2)
    store = Store.open()
    lock = store.lock(name_of(busy))
    assert lock.acquire(wait=False)
    progress, results = Recorder(), []
    thread = threading.Thread(target=lambda: results.extend(build_units([busy, free], store, progress=progress)))
    thread.start()
    try:
        wait_until(lambda: ("wait", name_of(busy)) in progress.events)
        assert store.lookup(free, find_toolchain()) is not None
        assert store.lookup(busy, find_toolchain()) is None
    finally:
        lock.release()
        thread.join()
    assert [result.was_cached for result in results] == [False, False]


def test_what_another_builder_published_meanwhile_is_used(kit):
    store = Store.open()
    lock = store.lock(name_of(UNIT))
    lock.acquire(wait=False)
    progress, results = Recorder(), []
    thread = threading.Thread(target=lambda: results.extend(build_units([UNIT], store, progress=progress)))
    thread.start()
    wait_until(lambda: ("wait", name_of(UNIT)) in progress.events)
    # Published by hand in the place of the other builder, which is this test.
    other = Store([store.roots[0].parent / "other"])
    built = build_units([UNIT], other)[0].entry
    built.path.rename(store.roots[0] / "v1" / built.name)
    lock.release()
    thread.join()
    assert results[0].was_cached
    assert compiles(kit) == 1


def test_a_killed_builder_leaves_nothing_in_the_way(kit, tmp_path):
    write_toolchain(kit, before_nvcc='case "$(cat kernel.cu)" in "// 1") sleep 30;; esac')
    code = "from test_build import units; from fake_toolchain import build_in_process; build_in_process(units(2))"
    environment = knobs.child_environment(PYTHONPATH=":".join(sys.path), DSAGEN_MAX_JOBS="1")
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
    first, second = units(2)
    store = Store.open()
    wait_until(lambda: compiles(kit) == 2)
    wait_until(lambda: store.lookup(first, find_toolchain()) is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The entry that was done is whole, the lock of the other is free, and its half-made folder is still there.
    work = tmp_path / "store" / "v1" / ".work"
    assert [path.name.startswith(name_of(second)) for path in work.iterdir() if "n1" in path.name] == [True]
    write_toolchain(kit)
    results = build_units([first, second], store)
    assert [result.was_cached for result in results] == [True, False]
    assert [path for path in work.iterdir() if "n1" in path.name] == []
    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def interruptible():
    """A shell starts background jobs with interrupts ignored, and so may be this run of the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_stops_the_compilers_and_frees_the_locks(kit, tmp_path):
    write_toolchain(kit, before_nvcc=f"echo $$ > {kit}/pid; exec sleep 30")

    class Impatient(QuietProgress):
        def begin(self, kernels, jobs):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_units(units(2), Store.open(), progress=Impatient())
    assert time.monotonic() - start < 10
    compiler = Path("/proc") / (kit / "pid").read_text().strip()
    wait_until(lambda: not compiler.exists() or ") Z " in (compiler / "stat").read_text())
    assert list((tmp_path / "store" / "v1" / ".work").iterdir()) == []
    write_toolchain(kit)
    assert not any(result.was_cached for result in build_units(units(2), Store.open()))


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failing_kernel_does_not_stop_the_others(kit, tmp_path):
    bad = "echo 'kernel.cu(7): error: identifier \"y\" is undefined'; echo '1 error detected'; exit 2"
    write_toolchain(kit, before_nvcc=f'case "$(cat kernel.cu)" in "// 1") {bad};; esac')
    progress = Recorder()
    with pytest.raises(BuildError) as caught:
        build_units(units(3), Store.open(), progress=progress)
    lines = str(caught.value).splitlines()
    assert lines[0] == "1 of 3 kernels did not build:"
    assert lines[1] == 'fake.sm90a.n1: kernel.cu(7): error: identifier "y" is undefined'
    log = Path(lines[2].removeprefix("  log: "))
    assert "1 error detected" in log.read_text()
    assert log.parent == tmp_path / "store" / "v1" / ".failed" / name_of(units(2)[1])
    assert caught.value.exit_code == 3
    assert len(Store.open().entries()) == 2
    assert sum(event[0] == "finish" and event[2] for event in progress.events) == 2
    # The line to repeat it does just that, and a repaired compiler clears the remains.
    repeat = lines[3].removeprefix("  repeat: ")
    done = subprocess.run(["sh", "-c", repeat], capture_output=True, text=True, check=False)
    assert (done.returncode, "identifier" in done.stdout) == (2, True)
    write_toolchain(kit)
    assert [result.was_cached for result in build_units(units(3), Store.open())] == [True, False, True]
    assert not log.exists()


@pytest.mark.parametrize(
    "death", ["kill -9 $$", "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9"]
)
def test_a_killed_compiler_is_told_as_out_of_memory(kit, death):
    write_toolchain(kit, before_nvcc=death)
    with pytest.raises(
        BuildError, match=r"hint: the compiler was killed, most likely because memory ran out with 1 job"
    ):
        build_units([UNIT], Store.open())
    assert Store.open().entries() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log": GOOD_LOG.replace("0 bytes spill stores", "940 bytes spill stores")}, "940 bytes spill stores"),
        ({"log": GOOD_LOG.replace("0 bytes stack", "256 bytes stack")}, "256 bytes stack frame"),
        ({"log": f"ptxas info    : (C7508) setmaxnreg ignored\n{GOOD_LOG}"}, "(C7508) setmaxnreg ignored"),
        ({"log": GOOD_LOG.replace("dsa_fake", "dsa_fkae")}, "no entry function named dsa_fake"),
        ({"before_ptxas": "exit 0"}, "no entry function named dsa_fake"),
        ({"before_ptxas": f"cat <<'END'\n{GOOD_LOG}END\nexit 0"}, "left no kernel.cubin"),
        ({"before_ptxas": f"cat <<'END'\n{GOOD_LOG}END\n: > kernel.cubin; exit 0"}, "kernel.cubin of 0 bytes"),
        ({"before_ptxas": f"cat <<'END'\n{GOOD_LOG}END\necho text > kernel.cubin; exit 0"}, "that is not whole"),
    ],
)
def test_a_compile_that_succeeded_badly_is_not_published(kit, options, words):
    write_toolchain(kit, **options)
    with pytest.raises(BuildError) as caught:
        build_units([UNIT], Store.open())
    assert words in str(caught.value)
    assert Store.open().entries() == []


def test_a_planned_spill_is_published_with_its_figures(kit):
    write_toolchain(kit, log=GOOD_LOG.replace("0 bytes spill stores", "64 bytes spill stores"))
    entry = build_units([replace(UNIT, plan={"allow_spill_bytes": 64})], Store.open())[0].entry
    assert entry.report["spill_store_bytes"] == 64


def test_a_missing_host_compiler_stops_before_anything_is_compiled(kit, tmp_path):
    (tmp_path / "tools" / "g++").unlink()
    with pytest.raises(ToolchainError, match=r"no g\+\+ on PATH"):
        build_units([UNIT], Store.open())
    assert compiles(kit) == 0


def test_two_different_kernels_with_one_slug_are_refused():
    with pytest.raises(BuildError, match=r"share the slug fake\.sm90a\.x"):
        build_units([UNIT, replace(UNIT, text="// other\n")], Store.open())


def test_a_repeated_unit_is_compiled_once(kit):
    results = build_units([UNIT, UNIT], Store.open())
    assert results[0] == results[1]
    assert compiles(kit) == 1


def test_force_compiles_again(kit):
    first = build_units([UNIT], Store.open())[0]
    second = build_units([UNIT], Store.open(), force=True)[0]
    assert not second.was_cached
    assert second.entry.path == first.entry.path
    assert compiles(kit) == 2


@pytest.mark.parametrize("folder", ["a b", "a$b", "a'b", "ü"])
def test_odd_store_paths(monkeypatch, tmp_path, folder):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / folder))
    assert not build_units([UNIT], Store.open())[0].was_cached


def test_jobs_bound_how_many_run_at_once(kit):
    running, peak = kit / "running", kit / "peak"
    body = f"echo x >> {running}; sed -n '$=' {running} >> {peak}; sleep 0.2; sed -i 1d {running}"
    write_toolchain(kit, before_nvcc=body)
    build_units(units(4), Store.open(), jobs=1)
    assert set(peak.read_text().split()) == {"1"}
    peak.unlink()
    build_units(units(4), Store.open(), jobs=3, force=True)
    assert max(peak.read_text().split()) == "3"


# Progress and generated text ------------------------------------------------------------------------------------------


def test_progress_lines(kit):
    write_toolchain(kit, before_nvcc='case "$(cat kernel.cu)" in "// 1") exit 2;; esac')
    stream = io.StringIO()
    with pytest.raises(BuildError):
        build_units(units(2), Store.open(), progress=LineProgress(stream), jobs=1)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "compiling 2 kernels, 1 at once"
    assert lines[1].startswith(f"[1/2] {name_of(units(2)[0])} 0.")
    assert lines[2].startswith(f"[2/2] FAILED {name_of(units(2)[1])} 0.")


def test_the_bar_survives_a_build(capsys):
    build_units(units(2), Store.open(), progress=LiveProgress())
    assert capsys.readouterr().err.count("built") == 2


def test_progress_suits_the_stream():
    assert isinstance(make_progress(quiet=True), QuietProgress)
    assert isinstance(make_progress(), LineProgress)


def test_one_line_is_logged_per_compile_with_what_why_and_how_long(kit, caplog, monkeypatch):
    caplog.set_level("INFO", "dsagen")
    build_units([UNIT], Store.open())
    build_units([UNIT], Store.open())
    build_units([UNIT], Store.open(), force=True)
    build_units([replace(UNIT, text="// new\n")], Store.open())
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(kit / "newer", version="13.1.5")))
    entry = build_units([UNIT], Store.open())[0].entry
    entry.cubin_path.write_bytes(b"")
    build_units([UNIT], Store.open())
    lines = [message for message in caplog.messages if message.startswith("compiled fake.")]
    assert [line.partition(" registers ")[2] for line in lines] == [
        "(not in the store)",
        "(forced)",
        "(its text or flags have changed)",
        "(compiled by nvcc 13.0.88 only)",
        "(the entry is broken: kernel.cubin (0 bytes) does not match its checksum)",
    ]
    assert all(
        re.fullmatch(r"compiled fake\.sm90a\.x\.[0-9a-f]{12} in \d+\.\d\d s, 168", line.partition(" reg")[0])
        for line in lines
    )


def test_a_clock_that_jumps_changes_no_time_and_no_look_up(kit, monkeypatch):
    """Files from the future, and a clock that is set while a kernel compiles."""
    write_toolchain(kit, before_nvcc="touch -d '2040-01-01' ../started ../status.part; sleep 0.2")
    result = build_units([UNIT], Store.open())[0]
    assert 0.15 <= result.seconds < 20
    for path in result.entry.path.iterdir():
        os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert build_units([UNIT], Store.open())[0].was_cached


def test_the_memory_of_a_compile_is_recorded(kit):
    write_toolchain(kit, before_nvcc=f"exec {sys.executable} -c 'import time; x = bytearray(80 << 20); time.sleep(1)'")
    seen = []

    class Looks(Recorder):
        def look(self, running):
            seen.extend(running)

        def finish(self, name, seconds, failure, memory_bytes):
            self.memory_bytes = memory_bytes

    progress = Looks()
    with pytest.raises(BuildError):
        build_units([UNIT], Store.open(), progress=progress)
    assert 80 << 20 <= progress.memory_bytes < 300 << 20
    assert {running.name for running in seen} == {name_of(UNIT)}
    assert max(running.memory_bytes for running in seen) >= 80 << 20
    assert max(running.seconds for running in seen) > 0.5


def test_a_warm_build_reports_no_progress():
    build_units(units(2), Store.open())
    progress = Recorder()
    build_units(units(2), Store.open(), progress=progress)
    assert progress.events == []


def test_generated_text_is_written_only_when_it_changes(tmp_path):
    path = tmp_path / "out" / "generated" / "sm_90a" / f"{UNIT.slug}.cu"
    assert write_generated([UNIT], tmp_path / "out") == [path]
    assert path.read_text() == UNIT.text
    os.utime(path, ns=(1, 1))
    write_generated([UNIT], tmp_path / "out")
    assert path.stat().st_mtime_ns == 1
    write_generated([replace(UNIT, text="// new\n")], tmp_path / "out")
    assert path.read_text() == "// new\n"


# Real compilers -------------------------------------------------------------------------------------------------------

PROBE = """\
extern "C" __global__ void __launch_bounds__(128) dsa_probe(float* out, const float* in, int n) {
  __shared__ float row[128];
  int i = blockIdx.x * 128 + threadIdx.x;
  row[threadIdx.x] = i < n ? in[i] : 0.f;
  __syncthreads();
  if (i < n) out[i] = row[127 - threadIdx.x] * 2.f;
}
"""
# 96 live floats at 32 registers a thread.
SPILL = """\
extern "C" __global__ void __launch_bounds__(1024, 2) dsa_spill(float* out, const float* in, int n) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = in[i * 1024 + threadIdx.x];
  for (int r = 0; r < n; ++r) {
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i * 7 + 1) % 96] + in[r];
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 1024 + threadIdx.x] = a[i];
}
"""
# An array with a run-time index lives in local memory.
STACK = """\
extern "C" __global__ void dsa_stack(int* out, const int* in, int n) {
  int a[64];
  for (int i = 0; i < 64; ++i) a[i] = in[i] * n;
  for (int i = 0; i < n; ++i) a[in[i] & 63] += i;
  out[threadIdx.x] = a[in[threadIdx.x] & 63];
}
"""
# Without launch bounds ptxas cannot know the register pool and drops the setmaxnreg.
SETMAXNREG = """\
extern "C" __global__ void dsa_pool(int* out) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  out[threadIdx.x] = 1;
}
"""


def real_nvccs():
    found = [Path(folder) / "nvcc" for folder in (*MACHINE_PATH.split(":"), "/usr/local/cuda/bin") if folder]
    found += [path for site in sys.path for path in Path(site or ".").glob("nvidia/cu[0-9]*/bin/nvcc")]
    return list(dict.fromkeys(path for path in found if path.is_file()))


NVCCS = real_nvccs()


@pytest.fixture
def real(monkeypatch):
    if not NVCCS:
        pytest.skip("needs nvcc")
    monkeypatch.setenv("PATH", MACHINE_PATH)
    monkeypatch.setenv("DSAGEN_NVCC", str(NVCCS[0]))


@pytest.mark.compile
@pytest.mark.parametrize("nvcc", NVCCS, ids=str)
def test_a_real_kernel(monkeypatch, tmp_path, real, nvcc):
    monkeypatch.setenv("DSAGEN_NVCC", str(nvcc))
    # A function of the toolkit's headers is in the line table with a name that has a hash of this unit's path in it.
    store = (
        'asm volatile("st.shared.f32 [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(row + i % 128)), "f"(1.f));'
    )
    text = PROBE.replace("__syncthreads();", f"{store} __syncthreads();")
    unit = replace(UNIT, symbol="dsa_probe", text=text)
    entries = []
    for folder in ("one", "another/folder"):
        monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / folder))
        entries.append(build_units([unit], Store.open())[0].entry)
    report = entries[0].report
    assert (report["smem_static_bytes"], report["barriers"], report["spill_store_bytes"]) == (512, 1, 0)
    assert 4 <= report["registers"] <= 32
    assert ".target sm_90a" in entries[0].ptx_path.read_text()
    # Equal inputs give equal bytes wherever they are compiled, line table included.
    for member in ("ptx_path", "cubin_path"):
        assert getattr(entries[0], member).read_bytes() == getattr(entries[1], member).read_bytes()
    assert f'"{entries[0].name}/kernel.cu"' in entries[0].ptx_path.read_text()
    assert str(tmp_path).encode() not in entries[0].cubin_path.read_bytes()
    assert b"__cvta_generic_to_shared" in entries[0].cubin_path.read_bytes()
    toolkit = str(nvcc.resolve().parent.parent)
    assert toolkit.encode() not in entries[0].cubin_path.read_bytes()


@pytest.mark.compile
@pytest.mark.parametrize(
    ("symbol", "text", "words"),
    [
        ("dsa_spill", SPILL, "bytes spill stores"),
        ("dsa_stack", STACK, "256 bytes stack frame, 0 bytes spill stores"),
        ("dsa_pool", SETMAXNREG, "(C75"),
        ("dsa_probe", PROBE.replace("row[127", "rwo[127"), 'kernel.cu(6): error: identifier "rwo" is undefined'),
        ("dsa_other", PROBE, "no entry function named dsa_other"),
    ],
)
def test_a_real_kernel_is_refused(real, symbol, text, words):
    with pytest.raises(BuildError) as caught:
        build_units([replace(UNIT, symbol=symbol, text=text)], Store.open())
    assert words in str(caught.value)
    assert Store.open().entries() == []


@pytest.mark.compile
def test_real_instructions_of_another_arch_are_refused(real):
    text = PROBE.replace("__syncthreads();", '__syncthreads(); asm volatile("wgmma.fence.sync.aligned;");')
    unit = replace(UNIT, symbol="dsa_probe", text=text)
    build_units([unit], Store.open())
    with pytest.raises(BuildError, match=r"wgmma\.fence.* not supported on \.target 'sm_100a'"):
        build_units([replace(unit, slug="fake.sm100a.x", arch="sm_100a")], Store.open())


@pytest.mark.compile
def test_a_real_spill_is_allowed_by_its_plan(real):
    unit = replace(UNIT, symbol="dsa_stack", text=STACK, plan={"allow_spill_bytes": 256})
    assert build_units([unit], Store.open())[0].entry.report["stack_bytes"] == 256
