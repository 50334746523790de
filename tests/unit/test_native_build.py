"""How the launcher in C comes to be: compiled once, kept in the store, and what happens where it cannot be had."""

import logging
import multiprocessing
import os
import subprocess
import sys
import sysconfig

import pytest
import torch
from native_driver import COMPILER

from dsagen.errors import BuildError, KnobError, StoreError, ToolchainError
from dsagen.runtime import native

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    native._opened.cache_clear()
    native.load_module.cache_clear()
    yield tmp_path
    native._opened.cache_clear()
    native.load_module.cache_clear()


@pytest.fixture
def commands(monkeypatch):
    run, found = native._run, []
    monkeypatch.setattr(native, "_run", lambda command: (found.append(command), run(command)))
    return found


def test_it_is_compiled_once_and_found_again(store, commands):
    path = native.built()
    assert path == native.built() and len(commands) == 1
    assert path.parent == store / "launcher" and path.name.endswith(".abi3.so")
    assert {item.name for item in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_other_sources_are_another_file(store, monkeypatch, tmp_path):
    first = native.built()
    changed = tmp_path / "sources"
    changed.mkdir()
    for path in native.SOURCES.iterdir():
        (changed / path.name).write_text(path.read_text() + "\n// changed\n")
    monkeypatch.setattr(native, "SOURCES", changed)
    assert native.built() != first


def test_a_read_only_layer_is_searched(store, commands, monkeypatch, tmp_path):
    path = native.built()
    monkeypatch.setenv("DSAGEN_CACHE_DIR", f"{tmp_path / 'new'}:{store}")
    assert native.built() == path and len(commands) == 1


def _build_in(root, done):
    os.environ["DSAGEN_CACHE_DIR"] = root
    done.put(str(native.built()))


def test_processes_that_start_together_compile_it_once(store):
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    workers = [context.Process(target=_build_in, args=(str(store), done)) for _ in range(2)]
    for worker in workers:
        worker.start()
    paths = {done.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(paths) == 1 and len(list((store / "launcher").glob("*.so"))) == 1


def test_the_compiler_has_nothing_to_say_of_the_sources(tmp_path):
    flags = [flag for flag in native._FLAGS if flag != "-Wall"] + ["-Wall", "-Wextra", "-Werror"]
    include = sysconfig.get_path("include")
    command = [COMPILER, *flags, f"-I{include}", native.SOURCES / "launcher.c", "-o", tmp_path / "out.so"]
    subprocess.run([*command, *native._LIBRARIES], check=True)


def without_compiler(monkeypatch):
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))


def without_headers(monkeypatch):
    monkeypatch.setattr(native.sysconfig, "get_path", lambda _: "/nowhere")


def without_lock(monkeypatch):
    monkeypatch.setattr(native.sysconfig, "get_config_var", lambda _: 1)


def with_bad_flags(monkeypatch):
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-no-such-flag"))


def without_place(monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", "/proc/nothing/here")


MISSING = [
    (without_compiler, ToolchainError, "no C compiler on PATH"),
    (without_headers, ToolchainError, "no Python.h in /nowhere"),
    (without_lock, ToolchainError, "this one has none"),
    (with_bad_flags, BuildError, "the launcher does not compile"),
    (without_place, StoreError, "the launcher is not in the kernel store yet, and no folder of it can be written"),
]


@pytest.mark.parametrize(("remove", "kind", "message"), MISSING)
def test_without_it_launches_go_through_cuda_python(store, monkeypatch, caplog, remove, kind, message):
    remove(monkeypatch)
    with caplog.at_level(logging.WARNING, "dsagen"):
        state = native.open_launcher()
    assert state.launcher is None and message in state.problem
    assert "launches go through cuda-python" in caplog.text
    native._opened.cache_clear()
    monkeypatch.setenv("DSAGEN_LAUNCHER", "c")
    with pytest.raises(kind, match=message):
        native.open_launcher()


def test_it_needs_a_driver_only_when_it_is_opened(store):
    native.load_module()
    with pytest.raises(BuildError, match=r"does not fit this machine: .*libno-such-driver\.so"):
        native.open_on("libno-such-driver.so")
    with pytest.raises(BuildError, match=r"does not fit this machine: the CUDA driver has no cuLaunchKernelEx"):
        native.open_on("libc.so.6")


def test_the_knob_chooses(store, monkeypatch):
    monkeypatch.setenv("DSAGEN_LAUNCHER", "python")
    state = native.open_launcher()
    assert state.launcher is None and state.problem == "DSAGEN_LAUNCHER=python"
    monkeypatch.setenv("DSAGEN_LAUNCHER", "cc")
    with pytest.raises(KnobError, match=r"DSAGEN_LAUNCHER='cc': expected one of auto, c, python \(did you mean 'c'"):
        native.open_launcher()


@pytest.fixture
def stub_driver(tmp_path):
    names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamIsCapturing")
    (tmp_path / "stub.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    path = tmp_path / "libstub.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", path, tmp_path / "stub.c"], check=True)
    return str(path)


def test_a_torch_without_exchange_leaves_the_reading_to_python(store, stub_driver, monkeypatch, caplog):
    assert native.open_on(stub_driver).exchange is True
    monkeypatch.setattr(native, "_EXCHANGE", "__no_such_exchange__")
    with caplog.at_level(logging.WARNING, "dsagen"):
        state = native.open_on(stub_driver)
    assert state.launcher is not None and state.exchange is False
    assert f"torch {torch.__version__} has no __no_such_exchange__" in caplog.text


def test_an_exchange_of_another_generation_is_refused(store, stub_driver):
    import ctypes

    header = (ctypes.c_uint32 * 16)(2, 0)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(ctypes.addressof(header), b"dlpack_exchange_api", None)
    with pytest.raises(OSError, match="DLPack 2, expected 1"):
        types, forward_ad = (torch.Tensor, torch.nn.Parameter), torch.autograd.forward_ad
        native.load_module().Launcher(stub_driver, capsule, *types, torch.empty_like, forward_ad)


def test_the_module_is_of_the_limited_api():
    # One file serves every Python from 3.11 on.
    assert "#define Py_LIMITED_API 0x030B0000" in (native.SOURCES / "call.h").read_text()
    assert sys.version_info >= (3, 11)


@pytest.mark.parametrize("damage", [lambda data: data[:4096], lambda data: b"garbage" * 900, lambda data: b""])
def test_a_damaged_one_is_made_anew_before_it_is_loaded(store, commands, damage):
    path = native.built()
    path.write_bytes(damage(path.read_bytes()))
    assert native.load_module().Launcher
    assert len(commands) == 2 and path.with_name(f"{path.name}.broken").is_file()
