"""The emulator as a device, as far as nothing has to be compiled: names, limits, and the memory that a kernel gets."""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from types import SimpleNamespace

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins

import dsagen
from dsagen.arch import arch
from dsagen.build import StoreEntry
from dsagen.build.compile import PTX
from dsagen.build.entry import BrokenEntryError, EntryStamp
from dsagen.check.cases import decode_cases
from dsagen.check.place import MOST_COLUMN_HEADS, too_large
from dsagen.check.run import run_check
from dsagen.check.topk_cases import topk_cases
from dsagen.emulator import library
from dsagen.errors import DeviceError, EmulatorLimitError, GuardError, KnobError, SpecError, ToolchainError
from dsagen.families.topk.op import assumed_clusters
from dsagen.runtime import emulated
from dsagen.runtime.api import Kernels
from dsagen.runtime.driver import DriverError, LaunchConfig, PointerField, cuda_home
from dsagen.runtime.emulated import EmulatorDriver, EmulatorOptions, bind_memory
from dsagen.spec import load_spec, shipped_specs


@pytest.fixture
def driver(monkeypatch):
    """A driver that never launches: no machine is compiled for it."""
    monkeypatch.setattr(emulated, "load_library", lambda: None)
    return EmulatorDriver(arch("sm_90a"))


# ---- names


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("emulater", r"device 'emulater' \(did you mean 'emulator'\?\): expected a CUDA device such as 0 or 'cuda:0'"),
        (
            "cpu",
            r"device 'cpu': expected a CUDA device such as 0 or 'cuda:0', or 'emulator', which runs kernels on CPU",
        ),
        (torch.device("cpu"), r"device 'cpu': expected a CUDA device"),
        ("gpu0", r"device 'gpu0': expected a CUDA device"),
        ("", r"device '': expected a CUDA device"),
        ("cuda:-1", r"device 'cuda:-1': expected a CUDA device"),
        (1.5, r"\[T-12\] device 1\.5: expected a CUDA device"),
        (True, r"device True: expected a CUDA device"),
        ([], r"device \[\]: expected a CUDA device"),
        (-1, r"device -1: expected a CUDA device"),
    ],
)
def test_an_unknown_device_is_named_whether_or_not_there_is_a_gpu(device, text):
    with pytest.raises(GuardError, match=text):
        dsagen.load("v32_h16", device=device)
    with pytest.raises(GuardError, match=text):
        run_check("v32_h16", device=device, record=False)


@pytest.mark.parametrize("device", [None, "emulator"])
def test_a_launcher_of_no_known_name_is_told_wherever_kernels_run(monkeypatch, device):
    monkeypatch.setenv("DSAGEN_LAUNCHER", "go")
    with pytest.raises(KnobError, match=r"^DSAGEN_LAUNCHER='go': expected one of auto, c, python"):
        dsagen.load("v32_h16", device=device)


@pytest.mark.parametrize("device", [None, "emulator"])
@pytest.mark.parametrize("options", [3, "seed", {"seed": 1}, EmulatorOptions, False])
def test_options_of_another_kind_are_refused(device, options):
    text = r"\[T-12\] emulator: expected options, found .*: pass dsagen.EmulatorOptions, such as"
    with pytest.raises(GuardError, match=text):
        dsagen.load("v32_h16", device=device, emulator=options)
    with pytest.raises(GuardError, match=text):
        run_check("v32_h16", device=device, emulator=options, record=False)


def test_options_of_the_emulator_need_the_emulator():
    with pytest.raises(GuardError, match="emulator: options for device='emulator', but device is 'cuda:0'"):
        dsagen.load("v32_h16", device="cuda:0", emulator=EmulatorOptions(seed=1))
    with pytest.raises(SpecError, match="arch 'sm_80': only the emulator stands for an arch of choice"):
        run_check("v32_h16", arch="sm_80", record=False)


def test_tensors_elsewhere_are_told_where_to_go(driver):
    assert driver.ordinal(torch.device("cpu")) == 0
    assert driver.ordinal(torch.device("cuda", 0)) is None
    text = driver.wanted_home("q", torch.device("cuda", 0))
    assert text.startswith("the CPU, since these kernels were loaded with device='emulator': move it with q.cpu()")
    assert cuda_home("q", torch.device("cpu")).endswith(
        "or load the spec with device='emulator' to run kernels on the CPU"
    )
    assert "emulator" not in cuda_home("q", torch.device("meta"))


class DriverOfGpus(FakeDriver):
    """One that does not serve the CPU, as the real one."""

    def ordinal(self, device):
        return 0 if device.type == "cuda" else None

    def torch_device(self, ordinal):
        return torch.device("cuda", ordinal)


def test_tensors_of_the_cpu_are_refused_by_kernels_of_a_gpu():
    advice = "on cpu, expected a CUDA device: move it with {0}.to('cuda'), or load the spec with device='emulator' to"
    kernels = Kernels(load_spec("v32_h16"), open_driver=DriverOfGpus, read=fake_cubins)
    q, k_cache = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 64, 1, 656, dtype=torch.uint8)
    with pytest.raises(GuardError) as raised:
        kernels.sparse_decode(q, k_cache, torch.zeros(1, 1, 64, dtype=torch.int32))
    assert str(raised.value).startswith("[T-03] q: " + advice.format("q"))
    selection = Kernels(load_spec("v32_topk_h128"), open_driver=DriverOfGpus, read=fake_cubins)
    with pytest.raises(GuardError) as raised:
        selection.topk(torch.zeros(1, 64), k=3)
    assert str(raised.value).startswith("[T-03] scores: " + advice.format("scores"))
    for name in ("emulator", "cpu"):
        with pytest.raises(DeviceError, match=rf"device '{name}': expected one of the 1 CUDA device\(s\)"):
            kernels.prepare([name])


def test_the_device_has_the_limits_of_its_arch_and_says_whose_sm_count_it_takes(driver):
    facts = driver.facts(0)
    assert (facts.capability, facts.sm_count, facts.smem_optin_bytes) == ((9, 0), 132, 227 * 1024)
    assert facts.name == "emulator with the SM count of an NVIDIA H200"
    driver.arch = arch("sm_80")
    assert (driver.facts(0).capability, driver.facts(0).smem_optin_bytes) == ((8, 0), 163 * 1024)


def test_the_device_holds_as_many_clusters_as_are_assumed_without_one(driver):
    def clusters(size: int, count: int) -> int:
        return driver.most_clusters(0, None, LaunchConfig(size * count, 1024, 0, 0, False, cluster=size))

    # All that there could be are asked for, then one.
    found = {size: (clusters(size, 132 // size), clusters(size, 1)) for size in (8, 4, 2)}
    assert found == {8: (15, 15), 4: (32, 32), 2: (65, 65)}
    assert {size: first for size, (first, _) in found.items()} == assumed_clusters(driver.facts(0).sm_count)
    for grid in (0, 12):
        with pytest.raises(DriverError, match="cuOccupancyMaxActiveClusters: CUDA_ERROR_INVALID_VALUE"):
            driver.most_clusters(0, None, LaunchConfig(grid, 1024, 0, 0, False, cluster=8))


def test_knobs_choose_what_options_leave_open(driver, monkeypatch):
    assert (driver.seed, driver.races) == (0, True)
    monkeypatch.setenv("DSAGEN_EMULATOR_SEED", "7")
    monkeypatch.setenv("DSAGEN_EMULATOR_RACES", "0")
    monkeypatch.setenv("DSAGEN_EMULATOR_THREADS", "3")
    chosen = EmulatorDriver(arch("sm_90a"))
    assert (chosen.seed, chosen.races, chosen.threads) == (7, False, 3)
    given = EmulatorDriver(arch("sm_90a"), EmulatorOptions(seed=0, races=True, threads=1))
    assert (given.seed, given.races, given.threads) == (0, True, 1)


@pytest.mark.parametrize("name", ["SEED", "THREADS", "MOST_CTAS"])
@pytest.mark.parametrize("value", ["-1", "1.5", "many", "99999999999999999999"])
def test_knobs_refuse_what_is_no_number(name, value, monkeypatch):
    monkeypatch.setattr(emulated, "load_library", lambda: None)
    monkeypatch.setenv(f"DSAGEN_EMULATOR_{name}", value)
    with pytest.raises(KnobError, match=f"DSAGEN_EMULATOR_{name}='{value}': expected a whole number"):
        EmulatorDriver(arch("sm_90a"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": -1}, r"\[T-12\] seed: -1, expected 0 to 9223372036854775807 for the emulator"),
        ({"seed": 1 << 63}, r"\[T-12\] seed: 9223372036854775808, expected 0 to"),
        ({"threads": 0}, r"\[T-12\] threads: 0, expected 1 to 1024"),
        ({"threads": 2.0}, r"\[T-12\] threads: expected a whole number, found 2.0"),
        ({"seed": True}, r"\[T-12\] seed: expected a whole number, found True"),
        ({"races": 1}, r"\[T-12\] races: expected True or False, found 1"),
        ({"counters": None}, r"\[T-12\] counters: expected True or False, found None"),
        ({"observe": 3}, r"\[T-12\] observe: expected a function of an EmulatedLaunch, found 3"),
    ],
)
def test_options_outside_their_range_are_refused(options, text):
    with pytest.raises(GuardError, match=text):
        EmulatorOptions(**options)


# ---- what is missing, what is too large


def test_without_a_compiler_loading_says_so(monkeypatch, tmp_path):
    library.load_library.cache_clear()
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no g\+\+ on PATH: the emulator compiles its machine with it") as raised:
        dsagen.load("v32_h16", device="emulator")
    assert raised.value.exit_code == 3


def test_the_code_of_an_entry_is_read_verified(tmp_path):
    (tmp_path / PTX).write_text("text")
    checksums = {PTX: hashlib.sha256(b"text").hexdigest()}
    stamp = EntryStamp("the-slug.0", "the-slug", "dsa_x", "sm_90a", "0", "0", "13.0.88")
    entry = StoreEntry(tmp_path, stamp, {}, {}, {"registers": 1}, checksums)
    assert emulated.code_of(entry) == emulated.EmulatedCode("text", 1)
    (tmp_path / PTX).write_text("test")
    with pytest.raises(BrokenEntryError, match=r"kernel\.ptx \(4 bytes\) does not match its checksum"):
        emulated.code_of(entry)


def test_a_grid_beyond_the_limit_is_refused(driver):
    run = driver.make_launch(0, SimpleNamespace(symbol="the_kernel"), LaunchConfig(4097, 32, 0, 0, False), None)
    with pytest.raises(EmulatorLimitError) as raised:
        run(())
    assert str(raised.value) == (
        "[T-18] grid: the_kernel would run 4097 CTAs, the emulator's limit is 4096: pass a smaller batch, or raise "
        "DSAGEN_EMULATOR_MOST_CTAS and wait longer"
    )


def test_cases_beyond_the_limit_are_told_apart():
    for name in shipped_specs():
        spec = load_spec(name)
        decode, topk = decode_cases("quick", 64, spec.kv_format.record_bytes), topk_cases("quick")
        refused = [case.name for case in (*decode, *topk) if too_large(spec, case)]
        # Calls that fill a device, many times over.
        assert [name for name in refused if not re.fullmatch(r"topk\.body\..*\.repeated", name)] == []
    spec = load_spec("v32_h16")
    refused = {case.name: too_large(spec, case) for case in decode_cases("full", 64, 656)}
    assert refused["large.far_pool"].startswith("too large for the emulator: 5,368,")
    assert refused["large.far_pool"].endswith("bytes of tensors, its limit is 1,073,741,824")
    name = "peer.b321.sq3.kv2046.topk2048.page64.length_none"
    assert refused[name] == ""
    refused = {case.name: too_large(load_spec("v32_h128"), case) for case in decode_cases("full", 64, 656)}
    assert refused[name] == (
        f"too large for the emulator: {963 * 2048 * 128:,} index columns x heads over all calls, its limit is "
        f"{MOST_COLUMN_HEADS:,}"
    )
    assert refused["large.batch"].startswith("too large for the emulator: 70,000 rows, and a launch of more than 4,096")
    topk = {case.name: too_large(spec, case) for case in topk_cases("full")}
    assert "bytes of tensors" in topk["topk.large.far"] and "scores over all calls" in topk["topk.large.batch"]
    assert "70,000 rows" in topk["topk.large.rows"]
    assert topk["topk.large.long.constant"] == ""


# ---- memory


def block(*values: int) -> bytearray:
    return bytearray(struct.pack(f"<{len(values)}Q", *values))


def pointers(*names: str) -> tuple[PointerField, ...]:
    """Fields one after the other; a name in capitals is written."""
    return tuple(PointerField(name.lower(), 8 * n, name.isupper()) for n, name in enumerate(names))


def test_operands_become_buffers_from_their_first_to_their_last_element():
    storage = torch.arange(100, dtype=torch.int32)
    rows = storage[8:].as_strided((3, 4), (10, 1), 8)
    values = block(rows.data_ptr(), 0)
    memory, written = bind_memory(values, pointers("rows", "NONE"), (rows, None), ())
    (buffer,) = memory.buffers
    assert (buffer.name, buffer.size_bytes, buffer.host, buffer.writable) == ("rows", 4 * 24, rows.data_ptr(), False)
    assert struct.unpack("<2Q", values) == (buffer.address, 0)
    # What the address is a multiple of, it stays.
    assert buffer.address % 64 == rows.data_ptr() % 64
    assert written == ()


def test_pointers_into_one_operand_share_its_buffer():
    workspace = torch.zeros(4096, dtype=torch.uint8)
    values = block(workspace.data_ptr(), workspace.data_ptr() + 512)
    memory, written = bind_memory(values, pointers("LSE", "o"), (workspace,), ())
    (buffer,) = memory.buffers
    assert (buffer.name, buffer.writable) == ("lse and o", True)
    assert struct.unpack("<2Q", values) == (buffer.address, buffer.address + 512)
    assert written == (range(workspace.data_ptr(), workspace.data_ptr() + 4096),)


def test_a_pointer_into_nothing_leads_nowhere():
    empty = torch.zeros(0, 5, dtype=torch.int32)
    values = block(0x1234, 1)
    memory, _ = bind_memory(values, pointers("table", "other"), (empty,), ())
    assert memory.buffers == [] and struct.unpack("<2Q", values) == (1, 1)


def test_operands_of_one_first_byte_get_the_longer_buffer():
    whole = torch.zeros(64)
    values = block(whole.data_ptr())
    memory, _ = bind_memory(values, pointers("a"), (whole[:8], whole), ())
    assert [buffer.size_bytes for buffer in memory.buffers] == [256]


def test_what_the_grid_before_writes_is_out_of_reach_until_the_wait():
    one, two = torch.zeros(64), torch.zeros(64)
    values = block(one.data_ptr(), two.data_ptr())
    hidden = (range(one.data_ptr() + 8, one.data_ptr() + 9),)
    memory, _ = bind_memory(values, pointers("one", "two"), (one, two), hidden)
    assert {buffer.name: buffer.after_wait for buffer in memory.buffers} == {"one": True, "two": False}


def test_what_a_kernel_writes_holds_nothing_before_unless_it_is_kept():
    tensors = [torch.zeros(64) for _ in range(3)]
    values = block(*(tensor.data_ptr() for tensor in tensors))
    fields = (
        PointerField("read", 0, False),
        PointerField("out", 8, True),
        PointerField("workspace", 16, True, kept=True),
    )
    memory, _ = bind_memory(values, fields, tensors, ())
    held = {buffer.name: buffer.valid is None for buffer in memory.buffers}
    assert held == {"read": True, "out": False, "workspace": True}


def test_buffers_lie_far_apart():
    tensors = [torch.zeros(1 << n, dtype=torch.uint8) for n in (4, 12, 24)]
    values = block(*(tensor.data_ptr() for tensor in tensors))
    memory, _ = bind_memory(values, pointers("a", "b", "c"), tensors, ())
    ends = [buffer.address + buffer.size_bytes for buffer in memory.buffers]
    assert all(later.address - end >= 1 << 24 for end, later in zip(ends, memory.buffers[1:], strict=False))
    assert ctypes.string_at(memory.buffers[0].host, 4) == bytes(4)
