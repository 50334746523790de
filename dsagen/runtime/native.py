"""The launcher in C: compiled on first use, kept in the kernel store's folder by the content of its sources."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from dsagen import kept_library, knobs
from dsagen.errors import BuildError, StoreError, ToolchainError

_LOG = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "native_c"
_WHAT = "the launcher"
_MODULE = "dsagen_launcher"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-Wall")
_LIBRARIES = ("-ldl", "-lpthread")
_COMPILERS = ("gcc", "cc", "clang")
CUDA_LIBRARY = "libcuda.so.1"
# Where torch offers its exchange of tensors; versions that were seen to: 2.11 and 2.13.
_EXCHANGE = "__dlpack_c_exchange_api__"


@dataclass(frozen=True)
class LauncherState:
    """The launcher, or why launches go through cuda-python instead; `exchange` says whether it reads tensors itself."""

    launcher: Any
    problem: str | None
    exchange: bool


def open_launcher(wanted: str | None = None) -> LauncherState:
    """The launcher on this machine's CUDA driver, as `wanted` or else DSAGEN_LAUNCHER asks for it.

    "auto" (the default) falls back to cuda-python where the launcher cannot be compiled, and logs why; "c" raises
    ToolchainError or BuildError there; "python" asks for the fallback.
    """
    wanted = knobs.LAUNCHER.get() if wanted is None else wanted
    if wanted == "python":
        return LauncherState(None, f"{knobs.LAUNCHER.name}=python", exchange=False)
    return _opened(CUDA_LIBRARY, wanted == "c")


def open_on(driver_library: str) -> LauncherState:
    """The launcher on a given driver library. Raises ToolchainError or BuildError where it cannot be compiled."""
    module = load_module()
    exchange = getattr(torch.Tensor, _EXCHANGE, None)
    try:
        types = torch.Tensor, torch.nn.Parameter
        launcher = module.Launcher(driver_library, exchange, *types, torch.empty_like, torch.autograd.forward_ad)
    except OSError as error:
        raise BuildError(f"the launcher does not fit this machine: {error}") from None
    problem = None
    if exchange is None:
        problem = f"torch {torch.__version__} has no {_EXCHANGE}, so Python reads the tensors of each call"
        _LOG.warning("launcher: %s", problem)
    return LauncherState(launcher, problem, exchange is not None)


@cache
def _opened(driver_library: str, required: bool) -> LauncherState:
    try:
        return open_on(driver_library)
    except (BuildError, StoreError) as error:
        if required:
            raise
        problem = " ".join(str(error).split())
        _LOG.warning("launches go through cuda-python, at a higher cost on the host: %s", problem)
        return LauncherState(None, problem, exchange=False)


@cache
def load_module() -> Any:
    """The extension module, compiled where no writable or read-only root of the store has it."""
    loader = ExtensionFileLoader(_MODULE, str(built()))
    spec = spec_from_loader(_MODULE, loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise StoreError(
            f"the launcher cannot be loaded ({error}): if its file system forbids to execute, set "
            f"{knobs.CACHE_DIR.name} to a folder of another one"
        ) from None
    return module


def built() -> Path:
    """The extension's file. ToolchainError without a C compiler or Python's headers, BuildError when it fails."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ToolchainError("the launcher is written for Pythons with a global lock, and this one has none")
    return kept_library.obtain(_WHAT, f"launcher-{_digest()}.abi3.so", _folders(), _compile_in)


def _folders() -> Sequence[Path]:
    return kept_library.folders(kept_library.LAUNCHER)


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join((*_FLAGS, *_LIBRARIES, sys.implementation.name, os.uname().machine)).encode())
    return digest.hexdigest()[:16]


def _compile_in(folder: Path) -> Path:
    command, include = _compiler(), _headers()
    library = folder / "launcher.so"
    _run([command, *_FLAGS, f"-I{include}", str(SOURCES / "launcher.c"), "-o", str(library), *_LIBRARIES])
    return library


def _compiler() -> str:
    for name in _COMPILERS:
        found = shutil.which(name, path=knobs.foreign("PATH"))
        if found is not None:
            return found
    raise ToolchainError(f"no C compiler on PATH ({', '.join(_COMPILERS)}): the launcher is compiled with it, once")


def _headers() -> str:
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").is_file():
        raise ToolchainError(f"no Python.h in {include}: install the headers of this Python (python3-dev or alike)")
    return include


def _run(command: list[str]) -> None:
    kept_library.run_compiler(_WHAT, command)
