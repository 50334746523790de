"""The real driver class through cuda-python, against a stand-in for libcuda.so.1 that prints every call it gets."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

DEVICES = """
driver = CudaDriver()
out(driver.device_count(), driver.facts(1) == DeviceFacts("stub 1", (9, 0), 132, 232448))
out(driver.ordinal(torch.device("cuda", 1)), driver.ordinal(torch.device("cpu")), driver.torch_device(1))
"""
LOAD = r"""
driver = CudaDriver()
kernel = driver.load_kernel(1, b"\x7fELF....", "dsa_kernel")
out(driver.attributes(1, kernel) == KernelAttributes(104, 103, 101, 100))
driver.allow_dynamic_smem(1, kernel, 200000)
driver.prefer_shared_memory(1, kernel)
"""
LAUNCH = r"""
driver = CudaDriver()
kernel = driver.load_kernel(1, b"\x7fELF....", "dsa_kernel")
out("go")
for overlaps in (False, True):
    config, block = LaunchConfig(2147483647, 256, 199424, 0x77, overlaps), Block()
    launch, kept = driver.make_launch(1, kernel, config, block), weakref.ref(block)
    del block
    assert kept() is not None, "whoever launches has no arguments"
    try:
        launch(())
    except DriverError as error:
        out(error.code, error)
"""
BOTH_WAYS = r"""
driver = CudaDriver()
kernel = driver.load_kernel(1, b"\x7fELF....", "dsa_kernel")
function, context = driver.handles(1, kernel)

def fail(code, *_):
    raise driver.error_of("cuLaunchKernelEx", code)

calls = driver.launcher().calls(1, 0, 0, 9, fail)
for overlaps in (False, True):
    for cluster in (1, 2):
        config = LaunchConfig(8, 256, 199424, 0x77, overlaps, cluster=cluster)
        row = (function, 8, 256, 199424, overlaps, cluster, b"hello block", ())
        for way in (
            lambda: driver.make_launch(1, kernel, config, Block())(()),
            lambda: calls.launch(0x77, context, (row,), ()),
        ):
            out("way")
            try:
                way()
            except DriverError as error:
                out(error.code, error)
"""
CLUSTERS = r"""
driver = CudaDriver()
kernel = driver.load_kernel(1, b"\x7fELF....", "dsa_kernel")
out("go")
out(driver.most_clusters(1, kernel, LaunchConfig(128, 640, 204800, 0x77, True, cluster=8)))
"""
CONTEXTS = """
driver = CudaDriver()
driver.synchronize(1, 0x77)
cuda.cuCtxPushCurrent(0x1001)
driver.synchronize(1, 0x77)
cuda.cuCtxPopCurrent()
driver.synchronize(0, 0)
"""
CAPTURE = """
driver = CudaDriver()
out(driver.is_capturing(1), driver.is_capturing(0), driver.capture_id(1), driver.capture_id(0))
driver._launcher = LauncherState(None, None, False)
out(driver.is_capturing(1), driver.is_capturing(0))
"""
LOAD_FAILS = r"""
try:
    CudaDriver().load_kernel(0, b"\x7fELF....", "dsa_kernel")
except DriverError as error:
    out(error.code == NO_BINARY)
"""
OPEN_FAILS = """
try:
    CudaDriver()
except DeviceError as error:
    out(error)
"""

# Name: (what runs, environment that it runs in). All of them run in one process, for torch takes seconds to import.
SCENARIOS = {
    "devices": (DEVICES, {}),
    "load": (LOAD, {}),
    "launch": (LAUNCH, {}),
    "launch fails": (LAUNCH, {"STUB_FAIL": "cuLaunchKernelEx=700"}),
    "both ways": (BOTH_WAYS, {}),
    "both ways fail": (BOTH_WAYS, {"STUB_FAIL": "cuLaunchKernelEx=700"}),
    "clusters": (CLUSTERS, {}),
    "contexts": (CONTEXTS, {}),
    "capture": (CAPTURE, {}),
    "capture elsewhere": (CAPTURE, {"STUB_FAIL": "cuStreamIsCapturing=906"}),
    "other arch": (LOAD_FAILS, {"STUB_FAIL": "cuLibraryGetKernel=209"}),
    "no init": (OPEN_FAILS, {"STUB_FAIL": "cuInit=100"}),
    "no device": (OPEN_FAILS, {"STUB_COUNT": "0", "CUDA_VISIBLE_DEVICES": "3"}),
    "hidden devices": (OPEN_FAILS, {"STUB_COUNT": "0", "CUDA_VISIBLE_DEVICES": ""}),
    "old driver": (OPEN_FAILS, {"STUB_VERSION": "12040"}),
}

# torch's CUDA half is absent on the machines that run this, so its three entry points are played.
PROGRAM = """
import ctypes, json, os, sys, torch, weakref
torch.version.cuda = "13.0"
torch.cuda.init = lambda: None
torch._C._cuda_getCurrentRawStream = {0: 0, 1: 0x77}.__getitem__
from cuda.bindings import driver as cuda
from dsagen.errors import DeviceError
from dsagen.runtime.native import LauncherState
from dsagen.runtime.driver import NO_BINARY, CudaDriver, DeviceFacts, DriverError, KernelAttributes, LaunchConfig

def out(*values):
    print("#", *values, flush=True)

class Block:
    "Of ArgumentBlock what a launch reads."

    def __init__(self):
        self.memory = ctypes.create_string_buffer(b"hello block")
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.memory))
        self.pointers_address = ctypes.addressof(self.pointers)

for name, (code, environment) in json.loads(sys.argv[1]).items():
    print("==", name, flush=True)
    os.environ.update(environment)
    exec(code)
    for variable in environment:
        del os.environ[variable]
"""


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory):
    """By scenario, the lines that the stub and the code printed, in order."""
    folder = tmp_path_factory.mktemp("stub")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([COMPILER, *flags, "-o", folder / "libcuda.so.1", HERE / "libcuda_stub.c", "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SCENARIOS)],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("== ")[1:]
    return {part.splitlines()[0]: part.splitlines()[1:] for part in parts}


def test_devices(lines_of):
    assert lines_of["devices"] == ["# 2 True", "# 1 None cuda:1"]


def test_loading_happens_in_the_devices_context(lines_of):
    assert lines_of["load"] == [
        "retain 1",
        "push 0x1001",
        "load \x7fELF.... options 0 0 current 0x1001",
        "kernel 0x2000 dsa_kernel",
        "function 0x3000 current 0x1001",
        "pop 0x1001",
        "push 0x1001",
        "pop 0x1001",
        "# True",
        "push 0x1001",
        "set 8 = 200000 of 0x3000 on 1",
        "pop 0x1001",
        "push 0x1001",
        "set 9 = 100 of 0x3000 on 1",
        "pop 0x1001",
    ]


def test_launches_reach_the_driver_as_configured(lines_of):
    lines = lines_of["launch"]
    sizes = "grid 2147483647 1 1 block 256 1 1 smem 199424"
    launched = f"launch 0x5001 {sizes} stream 0x77 attributes {{}} extra (nil) current 0x1001"
    plain = ["push 0x1001", launched.format(0), "params hello block", "pop 0x1001"]
    overlapping = ["push 0x1001", launched.format(1), "attribute 6 = 1 0 0", "params hello block", "pop 0x1001"]
    assert lines[lines.index("# go") + 1 :] == plain + overlapping


def test_clusters_are_counted_as_they_are_launched(lines_of):
    lines = lines_of["clusters"]
    asked = "clusters of 0x5001 grid 128 block 640 smem 204800 attributes 1: 4 = 8 1 1 current 0x1001"
    assert lines[lines.index("# go") + 1 :] == ["push 0x1001", asked, "pop 0x1001", "# 16"]


@pytest.mark.parametrize("scenario", ["both ways", "both ways fail"])
def test_the_launcher_in_c_calls_the_driver_as_cuda_python_does(lines_of, scenario):
    ways = "\n".join(lines_of[scenario]).split("# way\n")[1:]
    assert len(ways) == 8
    for by_python, by_c in zip(ways[::2], ways[1::2], strict=True):
        assert by_c.strip() == by_python.strip()
        assert "launch 0x5001 grid 8 1 1 block 256 1 1 smem 199424 stream 0x77" in by_c
        assert ("ILLEGAL_ADDRESS" in by_c) == (scenario == "both ways fail")
    counts = [re.search(r"attributes (\d)", way)[1] for way in ways[::2]]
    assert counts == ["0", "1", "1", "2"]
    assert ["attribute 4 = 2 1 1" in way for way in ways[::2]] == [False, True] * 2


def test_a_failing_launch_leaves_no_context_behind(lines_of):
    lines = lines_of["launch fails"]
    text = "# CUDA_ERROR_ILLEGAL_ADDRESS cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS: stub text"
    assert lines.count(text) == 2
    assert lines.count("push 0x1001") == lines.count("pop 0x1001") > 0


def test_a_context_that_is_current_is_not_pushed_again(lines_of):
    once = ["push 0x1001", "sync 0x77 current 0x1001", "pop 0x1001"]
    other = ["retain 0", "push 0x1000", "sync (nil) current 0x1000", "pop 0x1000"]
    assert lines_of["contexts"] == ["retain 1", *once, *once, *other]


def test_capture_is_seen(lines_of):
    found = [[line for line in lines_of[name] if line.startswith("#")] for name in ("capture", "capture elsewhere")]
    # The legacy stream cannot be asked while another stream is captured. The launcher and cuda-python agree.
    assert found == [["# True False 41 0", "# True False"], ["# True True 41 -1", "# True True"]]


def test_a_cubin_of_another_arch_keeps_its_code(lines_of):
    assert lines_of["other arch"][-2:] == ["pop 0x1000", "# True"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("no init", "an NVIDIA driver but no usable device: cuInit: CUDA_ERROR_NO_DEVICE"),
        ("no device", "an NVIDIA driver but no device (CUDA_VISIBLE_DEVICES='3')"),
        ("hidden devices", "an NVIDIA driver but no device (CUDA_VISIBLE_DEVICES is not set, or empty, which hides"),
        ("old driver", "the NVIDIA driver supports CUDA 12.4: kernels need 12.8"),
    ],
)
def test_what_is_missing_is_said(lines_of, scenario, message):
    (line,) = lines_of[scenario]
    assert message in line
