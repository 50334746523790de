"""Every environment variable that dsagen reads; no other module touches the process environment.

A knob is a typed record: `knobs.CACHE_DIR.get()` parses the variable `DSAGEN_CACHE_DIR` on each call, so a test or a
serving process may change it at run time. An unset or empty variable gives the default. A value that does not parse
raises `KnobError` with the variable's name, the value found and what is allowed.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from dsagen.errors import KnobError

T = TypeVar("T")

PREFIX = "DSAGEN_"
# Threads of the host that the emulator starts at most.
MOST_HOST_THREADS = 1024
LOG_LEVELS = ("quiet", "error", "warning", "info", "debug")
LAUNCHERS = ("auto", "c", "python")
BODIES = ("mma_sync", "hopper")
# As the value of DSAGEN_CHOICE_TABLE: no table at all.
NO_TABLE = "none"

_LEAST_GIGABYTES, _MOST_GIGABYTES = 0.001, 1e6
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_ARCH = re.compile(r"(?:sm_?)?(\d+)\.?(\d)([af]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable of dsagen: its name, type, default, meaning and parser.

    `fallbacks` are variables of other tools that are read, in order, when `name` itself is unset.
    `in_key` says that the value takes part in the content key of a compiled kernel.
    """

    name: str
    type_name: str
    default: T
    doc: str
    parse: Callable[[str], T] = field(repr=False)
    fallbacks: tuple[str, ...] = ()
    in_key: bool = False

    def raw(self) -> tuple[str, str] | None:
        """The variable that decides and its text, or None where every candidate is unset or empty."""
        for name in (self.name, *self.fallbacks):
            text = os.environ.get(name, "")
            if text.strip():
                return name, text
        return None

    def get(self) -> T:
        """The parsed value, or the default; raises KnobError for a value that is not allowed."""
        found = self.raw()
        if found is None:
            return self.default
        name, text = found
        try:
            _require_text(text)
            return self.parse(text.strip())
        except ValueError as error:
            default = "" if self._has_no_default else f" to get the default ({self.describe_default()})"
            raise KnobError(f"{name}={text!r}: {error}. Unset it{default}.") from None

    def is_set(self) -> bool:
        """True when the variable or one of its fallbacks holds a value."""
        return self.raw() is not None

    @property
    def _has_no_default(self) -> bool:
        return self.default is None or self.default == ()

    def describe_default(self) -> str:
        """The default as text for messages and for the doctor's table."""
        if self._has_no_default:
            return "not set"
        if isinstance(self.default, bool):
            return "1" if self.default else "0"
        return str(self.default)


@dataclass(frozen=True)
class UnknownKnob:
    """A DSAGEN_* variable that is set but that no knob reads; `suggestion` is the nearest knob, if any is near."""

    name: str
    value: str
    suggestion: str | None

    def message(self) -> str:
        """One line for the doctor."""
        hint = f"did you mean {self.suggestion}?" if self.suggestion else "`dsagen doctor` lists the known ones."
        return f"{self.name} is set but dsagen reads no such variable; {hint}"


def _require_text(text: str) -> None:
    """ValueError for bytes that are no UTF-8, which Python carries as surrogates: they fit no file that is written."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is no UTF-8") from None


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"expected one of {', '.join(_TRUE)} or {', '.join(_FALSE)}")


def _parse_jobs(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("expected a whole number of parallel compile jobs, 1 or more")
    return int(text)


def _parse_count(text: str, most: int = 999_999_999) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ValueError(f"expected a whole number from 1 to {most}")
    return int(text)


def _parse_seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 1 << 63:
        raise ValueError("expected a whole number from 0 to 2^63 - 1")
    return int(text)


def _parse_gigabytes(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", text):
        raise ValueError("expected a number of GiB above 0, for example 0.5")
    if not _LEAST_GIGABYTES <= float(text) <= _MOST_GIGABYTES:
        raise ValueError(f"expected {_LEAST_GIGABYTES:g} to {_MOST_GIGABYTES:g} GiB, for example 0.5")
    return float(text)


def _parse_path(text: str) -> Path:
    path = _expand_user(text)
    if not path.is_absolute():
        raise ValueError(
            "expected an absolute path (or one that starts with ~), since a relative one changes with the folder"
        )
    return path


def _expand_user(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"cannot expand ~ in {text!r} ({error})") from None


def _parse_existing_folder(text: str) -> str:
    path = _parse_path(text)
    try:
        found = path.is_dir()
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if not found:
        raise ValueError("there is no such folder")
    return str(path)


def _parse_path_list(text: str) -> tuple[Path, ...]:
    parts = text.split(":")
    if any(not part.strip() for part in parts):
        raise ValueError("an element is empty; expected folder[:folder...] with no leading, trailing or double colon")
    return tuple(_parse_path(part.strip()) for part in parts)


def _parse_arch_list(text: str) -> tuple[str, ...]:
    archs: list[str] = []
    for part in re.split(r"[\s,;]+", text):
        match = _ARCH.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no arch; expected a list such as 'sm_90a,sm_100a' or '9.0a 10.0a'")
        arch = f"sm_{match[1]}{match[2]}{match[3].lower()}"
        if arch not in archs:
            archs.append(arch)
    return tuple(archs)


def _parse_flags(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"not splittable into arguments ({error}); expected shell quoting") from None


def _parse_choice(text: str, choices: tuple[str, ...]) -> str:
    if text.lower() in choices:
        return text.lower()
    near = difflib.get_close_matches(text.lower(), choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"expected one of {', '.join(choices)}{hint}")


def _parse_table(text: str) -> str:
    return NO_TABLE if text.lower() == NO_TABLE else str(_parse_path(text))


def _parse_log_dest(text: str) -> str:
    return text if text in ("stderr", "stdout") else str(_parse_path(text))


CACHE_DIR: Knob[tuple[Path, ...]] = Knob(
    "DSAGEN_CACHE_DIR",
    "folder[:folder...]",
    (),
    "Kernel store. Of a colon list the first writable folder is written, the others are read-only layers. "
    "Default: $XDG_CACHE_HOME/dsagen, else ~/.cache/dsagen.",
    _parse_path_list,
)
ARCH_LIST: Knob[tuple[str, ...]] = Knob(
    "DSAGEN_ARCH_LIST",
    "arch list",
    (),
    "Architectures to build for, among those that the spec lists, for example 'sm_90a,sm_100a'.",
    _parse_arch_list,
)
NO_JIT: Knob[bool] = Knob(
    "DSAGEN_NO_JIT",
    "bool",
    False,
    "1: never compile while loading; a kernel that is not in the store is an error.",
    _parse_bool,
)
MAX_JOBS: Knob[int | None] = Knob(
    "DSAGEN_MAX_JOBS",
    "int >= 1",
    None,
    "Most compile jobs at once; further bounded by usable cores and free memory. MAX_JOBS is read when it is unset.",
    _parse_jobs,
    fallbacks=("MAX_JOBS",),
)
JOB_MEM_GB: Knob[float] = Knob(
    "DSAGEN_JOB_MEM_GB",
    "float > 0 (GiB)",
    0.5,
    "Memory reckoned for one compile job when the job count is chosen.",
    _parse_gigabytes,
)
NVCC: Knob[Path | None] = Knob(
    "DSAGEN_NVCC",
    "file",
    None,
    "The nvcc to use; nothing else is searched and a bad value is an error.",
    _parse_path,
)
EXTRA_NVCC_FLAGS: Knob[tuple[str, ...]] = Knob(
    "DSAGEN_EXTRA_NVCC_FLAGS",
    "shell words",
    (),
    "Flags added to every compile, after dsagen's own (-Xptxas options go to the ptxas step); part of a kernel's key. "
    "Those that change rounding, read other files or ask for other outputs are refused.",
    _parse_flags,
    in_key=True,
)
COMPILER_LAUNCHER: Knob[tuple[str, ...]] = Knob(
    "DSAGEN_COMPILER_LAUNCHER",
    "shell words",
    (),
    "Command put before each call of nvcc, such as 'sccache'; no part of a kernel's key.",
    _parse_flags,
)
LOG: Knob[str] = Knob(
    "DSAGEN_LOG",
    "|".join(LOG_LEVELS),
    "warning",
    "How much dsagen logs; 'info' prints a line per compiled kernel, 'debug' adds store look-ups and commands.",
    partial(_parse_choice, choices=LOG_LEVELS),
)
LOG_DEST: Knob[str] = Knob(
    "DSAGEN_LOG_DEST",
    "stderr, stdout or file",
    "stderr",
    "Where the log goes; in a process that loads kernels, beside the handlers that it has itself.",
    _parse_log_dest,
)
LAUNCHER: Knob[str] = Knob(
    "DSAGEN_LAUNCHER",
    "|".join(LAUNCHERS),
    "auto",
    "What launches: 'c' the launcher in C, 'python' cuda-python, 'auto' the first that this machine can have.",
    partial(_parse_choice, choices=LAUNCHERS),
)
SPARSE_DECODE_BODY: Knob[str | None] = Knob(
    "DSAGEN_SPARSE_DECODE_BODY",
    "|".join(BODIES),
    None,
    "Body of sparse_decode's main kernels, whatever choice tables say: 'hopper' where it is built (sm_90a, one KV "
    "head, up to 32 heads in a CTA), 'mma_sync' elsewhere. Default: what a table names, else 'hopper' where it is "
    "built.",
    partial(_parse_choice, choices=BODIES),
)
SPARSE_DECODE_LAUNCHES: Knob[int | None] = Knob(
    "DSAGEN_SPARSE_DECODE_LAUNCHES",
    "1|2",
    None,
    "1: launch 2, 4 or 8 splits of sparse_decode's body 'hopper' as a cluster that combines itself; other kernels and "
    "split counts stay with two launches. 2: always two. Default: what a choice table says, else 1 for two splits.",
    lambda text: int(_parse_choice(text, ("1", "2"))),
)
CHOICE_TABLE: Knob[str | None] = Knob(
    "DSAGEN_CHOICE_TABLE",
    "file or none",
    None,
    "The only choice table to read, such as `dsagen tune` writes, or 'none'. Default: the store's, then shipped ones.",
    _parse_table,
)
INDEXER_LOGITS_BODY: Knob[str | None] = Knob(
    "DSAGEN_INDEXER_LOGITS_BODY",
    "|".join(BODIES),
    None,
    "Body of indexer_logits, whatever the spec's index.accumulation: 'hopper' where it is built (sm_90a, keys in "
    "pages, with scores of candidate blocks too, fp8 keys in one piece), 'mma_sync' elsewhere. Default: 'hopper' where "
    "the spec takes its sums.",
    partial(_parse_choice, choices=BODIES),
)
TOPK_CLUSTER: Knob[int | None] = Knob(
    "DSAGEN_TOPK_CLUSTER",
    "1|2|4|8",
    None,
    "2, 4 or 8: let clusters of so many CTAs share the rows of topk wherever they fit; 1: never. Default: the largest "
    "that fits, where one CTA cannot hold a row.",
    lambda text: int(_parse_choice(text, ("1", "2", "4", "8"))),
)
DEBUG_SYNC: Knob[bool] = Knob(
    "DSAGEN_DEBUG_SYNC",
    "bool",
    False,
    "1: synchronise after each launch and name the kernel and its arguments when the device reports a fault.",
    _parse_bool,
)
CHECK_INDICES: Knob[bool] = Knob(
    "DSAGEN_CHECK_INDICES",
    "bool",
    False,
    "1: check ids and lengths on the device before each launch; one outside its range is an error instead of masked.",
    _parse_bool,
)
POISON_WORKSPACE: Knob[bool] = Knob(
    "DSAGEN_POISON_WORKSPACE",
    "bool",
    False,
    "1: fill sparse_decode's workspace, and a step's scores and ids, with NaN and -1 before each call, so that what is "
    "read before it is written shows.",
    _parse_bool,
)
PEER_SITE: Knob[str | None] = Knob(
    "DSAGEN_PEER_SITE",
    "folder",
    None,
    "Folder appended to the import path while `dsagen bench` looks for the kernel libraries that it compares with.",
    _parse_existing_folder,
)
EMULATOR_SEED: Knob[int] = Knob(
    "DSAGEN_EMULATOR_SEED",
    "int >= 0",
    0,
    "Order in which the emulator runs warps and lands copies: 0 in turn, any other drawn, and each time the same.",
    _parse_seed,
)
EMULATOR_RACES: Knob[bool] = Knob(
    "DSAGEN_EMULATOR_RACES",
    "bool",
    True,
    "0: the emulator does not look for accesses that nothing orders; its other checks stay.",
    _parse_bool,
)
EMULATOR_THREADS: Knob[int | None] = Knob(
    "DSAGEN_EMULATOR_THREADS",
    "int 1 to 1024",
    None,
    "Threads of the host that share a launch's CTAs on the emulator. Default: the usable cores.",
    partial(_parse_count, most=MOST_HOST_THREADS),
)
EMULATOR_MOST_CTAS: Knob[int] = Knob(
    "DSAGEN_EMULATOR_MOST_CTAS",
    "int >= 1",
    4096,
    "CTAs of a launch that the emulator takes; a larger one is an error instead of a wait of minutes.",
    _parse_count,
)

# All of this module, in their order.
_KNOBS: tuple[Knob[Any], ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Knob))

# Variables of other tools that dsagen reads as they are, and why. The NVCC and CPATH ones change what nvcc emits.
FOREIGN_VARIABLES: Mapping[str, str] = {
    "CUDA_HOME": "root of a CUDA toolkit, searched for bin/nvcc",
    "CUDA_PATH": "root of a CUDA toolkit, searched after CUDA_HOME",
    "PATH": "searched for nvcc and the host compiler",
    "NVCC_PREPEND_FLAGS": "flags that nvcc reads by itself; part of a kernel's key",
    "NVCC_APPEND_FLAGS": "flags that nvcc reads by itself; part of a kernel's key",
    "NVCC_CCBIN": "host compiler that nvcc takes by itself; part of a kernel's key",
    "CPATH": "include path that the host preprocessor reads by itself; part of a kernel's key",
    "CPLUS_INCLUDE_PATH": "include path that the host preprocessor reads by itself; part of a kernel's key",
    "XDG_CACHE_HOME": "parent of the default kernel store",
    "HOME": "home folder, parent of ~/.cache/dsagen",
    "CUDA_VISIBLE_DEVICES": "devices that the driver shows; printed by the doctor",
    "LD_LIBRARY_PATH": "where the driver library may be found; printed by the doctor",
}
CODE_CHANGING_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CPATH", "CPLUS_INCLUDE_PATH")
# Names that nvcc.profile appends to, and files that gcc would write: what a shell happens to export under them is kept
# from the compilers. LANGUAGE would translate the messages that are looked for.
KEPT_FROM_COMPILERS = (
    "INCLUDES",
    "SYSTEM_INCLUDES",
    "LIBRARIES",
    "CUDAFE_FLAGS",
    "PTXAS_FLAGS",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "LANGUAGE",
)


def all_knobs() -> tuple[Knob[Any], ...]:
    """Every knob, in the order in which the doctor prints them."""
    return _KNOBS


def unknown_knobs() -> list[UnknownKnob]:
    """The DSAGEN_* variables of the environment that no knob reads, each with the nearest known name."""
    known = {knob.name.removeprefix(PREFIX): knob.name for knob in _KNOBS}
    found = []
    for name in sorted(os.environ):
        stem = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and stem not in known:
            near = difflib.get_close_matches(stem, known, n=1)
            found.append(UnknownKnob(name, os.environ[name], known[near[0]] if near else None))
    return found


def foreign(name: str) -> str | None:
    """The text of another tool's variable, or None when it is unset or empty; `name` must be in FOREIGN_VARIABLES."""
    if name not in FOREIGN_VARIABLES:
        raise KeyError(f"{name} is not declared in knobs.FOREIGN_VARIABLES")
    return os.environ.get(name) or None


def code_changing_environment() -> dict[str, str]:
    """The variables that nvcc reads by itself and that change what it emits, those that are set; part of the key.

    Raises KnobError for one that is no UTF-8.
    """
    found = {name: text for name in CODE_CHANGING_VARIABLES if (text := foreign(name)) is not None}
    for name, text in found.items():
        try:
            _require_text(text)
        except ValueError as error:
            raise KnobError(f"{name}={text!r}: {error}: nvcc reads this variable; correct or unset it") from None
    return found


def default_cache_dir() -> Path:
    """The store's folder when DSAGEN_CACHE_DIR is unset; raises KnobError where no home folder can be told."""
    xdg = foreign("XDG_CACHE_HOME")
    # The XDG rule: a relative value is invalid and to be ignored.
    if xdg is not None and Path(xdg).is_absolute():
        return Path(xdg) / "dsagen"
    advice = "set DSAGEN_CACHE_DIR to a folder for compiled kernels"
    if os.environ.get("HOME") == "":  # which expanduser takes for the root folder
        raise KnobError(f"HOME='': names no home folder: {advice}")
    try:
        home = Path.home()
    except RuntimeError as error:
        raise KnobError(f"no home folder ({error}): {advice}") from None
    if not home.is_absolute():
        raise KnobError(f"HOME={str(home)!r}: is no absolute path, so it changes with the current folder: {advice}")
    return home / ".cache" / "dsagen"


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of the whole environment for a child process, with `changes` applied."""
    return {**os.environ, **changes}


def compiler_environment(**changes: str) -> dict[str, str]:
    """As `child_environment`, for a compile: without what would change its output unseen, messages in English."""
    kept = {name: text for name, text in os.environ.items() if name not in KEPT_FROM_COMPILERS}
    return {**kept, "LC_ALL": "C", **changes}
