"""Finding nvcc, its ptxas and the host compiler.

Order: DSAGEN_NVCC, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, then the toolkit from PyPI. What a variable names is
explicit: if it is unusable, that is an error with the variable's name. The others are skipped with a recorded reason.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsagen import knobs
from dsagen.ending import run_child
from dsagen.errors import KnobError, ToolchainError

MINIMUM_CUDA = (12, 8)
DEFAULT_TOOLKIT = Path("/usr/local/cuda")
PIP_HINT = "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'"
_VERSION = re.compile(r"\bV([0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,6})\b")
_QUERY_TIMEOUT_S = 60


@dataclass(frozen=True)
class NvccCandidate:
    """A place where an nvcc may lie; `origin` says who named it, `explicit` that a variable did."""

    path: Path
    origin: str
    explicit: bool


@dataclass(frozen=True)
class Toolchain:
    """A usable nvcc with the ptxas of the same release; `version` is like "13.0.88"."""

    nvcc: Path
    ptxas: Path
    version: str
    origin: str
    skipped: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """The CUDA release as (major, minor)."""
        return release_of(self.version)

    def require_host_compiler(self) -> None:
        """Raises ToolchainError when the C++ compiler that nvcc calls is missing, KnobError when a launcher is."""
        launcher = knobs.COMPILER_LAUNCHER.get()
        if launcher and shutil.which(launcher[0], path=knobs.foreign("PATH")) is None:
            raise KnobError(
                f"{knobs.COMPILER_LAUNCHER.name}={launcher[0]!r}: no program of that name that can be run: correct or "
                "unset it"
            )
        words = (*knobs.EXTRA_NVCC_FLAGS.get(), *(knobs.foreign("NVCC_PREPEND_FLAGS") or "").split())
        words += tuple((knobs.foreign("NVCC_APPEND_FLAGS") or "").split())
        # With a compiler named to nvcc, nvcc itself says best what is wrong with it.
        if knobs.foreign("NVCC_CCBIN") or any(word.startswith(("-ccbin", "--compiler-bindir")) for word in words):
            return
        missing = [name for name in ("gcc", "g++") if shutil.which(name, path=knobs.foreign("PATH")) is None]
        if missing:
            raise ToolchainError(
                f"nvcc {self.version} was found ({self.nvcc}) but the host compiler that it calls was not: no "
                f"{' and no '.join(missing)} on PATH. Install g++ (Debian, Ubuntu: apt-get install g++), or name a "
                "compiler with DSAGEN_EXTRA_NVCC_FLAGS='-ccbin /path/to/g++'."
            )


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "13.0.88"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def nvcc_candidates() -> Iterator[NvccCandidate]:
    """Every place that is searched, best first; raises ToolchainError for a toolkit variable that is no folder."""
    named = knobs.NVCC.get()
    if named is not None:
        yield NvccCandidate(named, "DSAGEN_NVCC", True)
        return
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = _toolkit_root(variable)
        if root is not None:
            yield NvccCandidate(root / "bin" / "nvcc", variable, True)
    for folder in (knobs.foreign("PATH") or "").split(":"):
        if folder and _is_file(Path(folder) / "nvcc"):
            yield NvccCandidate(Path(folder) / "nvcc", "PATH", False)
    yield NvccCandidate(DEFAULT_TOOLKIT / "bin" / "nvcc", str(DEFAULT_TOOLKIT), False)
    for site in dict.fromkeys(sys.path):
        for path in sorted(Path(site or ".").glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True):
            yield NvccCandidate(path, "PyPI", False)


def find_toolchain(minimums: Mapping[str, tuple[int, int]] | None = None) -> Toolchain:
    """The first usable toolchain that is new enough for every arch in `minimums` (arch name -> least CUDA release).

    Raises ToolchainError when a variable names an unusable one, or when none is found.
    """
    skipped: list[str] = []
    for candidate in nvcc_candidates():
        try:
            nvcc, ptxas, version = _probe(candidate.path)
            _check_release(version, minimums or {})
        except _UnusableError as problem:
            if candidate.explicit:
                raise ToolchainError(_explicit_message(candidate, str(problem))) from None
            skipped.append(f"{candidate.path} ({candidate.origin}): {problem}")
            continue
        return Toolchain(nvcc, ptxas, version, candidate.origin, tuple(skipped))
    raise ToolchainError(_none_message(skipped))


def clear_version_cache() -> None:
    """Forget the versions asked of compilers in this process."""
    _ask_version.cache_clear()


class _UnusableError(Exception):
    """Why one candidate cannot be used."""


def _is_file(path: Path) -> bool:
    """Whether a file can be seen there; a folder that may not be searched shows none."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _toolkit_root(variable: str) -> Path | None:
    text = knobs.foreign(variable)
    if text is None:
        return None
    if not Path(text).is_absolute() or not _is_folder(Path(text)):
        raise ToolchainError(
            f"{variable}={text!r} is not an existing folder given by an absolute path. Set it to the root of a CUDA "
            "toolkit (the folder that holds bin/nvcc), unset it, or name the compiler with DSAGEN_NVCC."
        )
    return Path(text)


def _explicit_message(candidate: NvccCandidate, problem: str) -> str:
    text = knobs.NVCC.raw() if candidate.origin == "DSAGEN_NVCC" else None
    value = text[1] if text else knobs.foreign(candidate.origin)
    return f"{candidate.origin}={value!r}: {candidate.path}: {problem}. Correct {candidate.origin} or unset it."


def _none_message(skipped: list[str]) -> str:
    lines = "".join(f"\n  skipped {line}" for line in skipped)
    return (
        "No usable nvcc (searched DSAGEN_NVCC, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda and site-packages). "
        f"Install one with {PIP_HINT}, or set DSAGEN_NVCC.{lines}"
    )


def _probe(path: Path) -> tuple[Path, Path, str]:
    """(nvcc, ptxas, version) of the nvcc at `path`; raises _UnusableError."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise _UnusableError(f"cannot be read ({error.strerror})") from None
    if not is_file:
        raise _UnusableError("no such file")
    version = _version_of(path)
    ptxas = _find_ptxas(path)
    if _version_of(ptxas) != version:
        raise _UnusableError(
            f"nvcc is {version} but its ptxas ({ptxas}) is {_version_of(ptxas)}: parts of two releases are mixed; "
            f"{PIP_HINT} keeps them together"
        )
    return path, ptxas, version


def _find_ptxas(nvcc: Path) -> Path:
    for folder in (nvcc.parent, nvcc.resolve().parent):
        if (folder / "ptxas").is_file():
            return folder / "ptxas"
    # nvcc may be a wrapper; its dry run names the folder of the real one.
    listing = _run([str(nvcc), "--dryrun", "-E", "-x", "cu", "/dev/null"])
    match = re.search(r"^#\$ _HERE_=(.+)$", listing, re.MULTILINE)
    if match and (Path(match[1].strip()) / "ptxas").is_file():
        return Path(match[1].strip()) / "ptxas"
    raise _UnusableError("there is no ptxas beside it")


def _version_of(tool: Path) -> str:
    try:
        real = tool.resolve(strict=True)
        stat = real.stat()
    except OSError as error:
        raise _UnusableError(f"cannot be read ({error.strerror})") from None
    return _ask_version(str(tool), str(real), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _ask_version(tool: str, real: str, mtime_ns: int, size_bytes: int) -> str:
    """The version that `tool` prints; the other arguments make the cache notice a replaced file."""
    match = _VERSION.search(_run([tool, "--version"]))
    if match is None:
        raise _UnusableError("its --version prints no version such as V13.0.88")
    return match[1]


def _run(command: list[str]) -> str:
    """Standard output and error of a short query; raises _UnusableError when it fails."""
    try:
        done = run_child(command, stdin=subprocess.DEVNULL, timeout=_QUERY_TIMEOUT_S)
    except OSError as error:
        raise _UnusableError(f"cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise _UnusableError(f"gave no answer within {_QUERY_TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise _UnusableError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode} ({last[0]:.200})")
    return done.stdout + done.stderr


def _check_release(version: str, minimums: Mapping[str, tuple[int, int]]) -> None:
    release = release_of(version)
    for arch, least in sorted(minimums.items()):
        if release < least:
            raise _UnusableError(
                f"CUDA {version} is too old for {arch}, which needs {_dotted(max(least, MINIMUM_CUDA))}"
            )
    if release < MINIMUM_CUDA:
        raise _UnusableError(f"CUDA {version} is too old: dsagen needs {_dotted(MINIMUM_CUDA)} or newer")


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
