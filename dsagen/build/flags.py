"""Compiler flags that users add: which step each is for, and which are refused by name.

What is refused would make another kernel than the one that was planned, checked and recorded: it changes how floating
point rounds, takes content from a file that the key does not see, asks for another output, or hides what the build
looks for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from dsagen import knobs
from dsagen.errors import KnobError

_PTXAS_WRAPPERS = ("Xptxas", "ptxas-options")
_HOST_WRAPPERS = ("Xcompiler", "compiler-options")
# Variables that nvcc reads flags from by itself.
FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

_ROUNDING = "changes how floating point rounds, and results are held to be exact"
_HIDDEN = "takes its content from a file that a kernel's key does not see"
_OUTPUT = "asks for another output than the PTX and the cubin of one arch, which dsagen chooses itself"
_SILENCE = "hides the messages that the build looks for"
_PASSED_ON = "hands flags past nvcc's own options, so what they change cannot be told"


def _all(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


# By name without dashes, as nvcc and ptxas spell them, long and short.
_REFUSED_BY_NVCC: Mapping[str, str] = {
    **_all(_ROUNDING, "use_fast_math", "ftz", "prec-div", "prec-sqrt", "fmad"),
    **_all(_HIDDEN, "options-file", "optf", "pre-include", "include", "libdevice-directory", "ldir"),
    **_all(_HIDDEN, "target-directory", "target-dir", "dont-use-profile", "noprof"),
    **_all(_HIDDEN, "include-path", "I", "system-include", "isystem"),
    **_all(_OUTPUT, "gpu-architecture", "arch", "gpu-code", "code", "generate-code", "gencode", "machine", "m"),
    **_all(_OUTPUT, "cuda", "cubin", "fatbin", "optix-ir", "ltoir", "preprocess", "E", "compile", "c"),
    **_all(_OUTPUT, "device-c", "dc", "device-w", "dw", "device-link", "dlink", "link", "lib", "run", "shared"),
    **_all(_OUTPUT, "output-file", "o", "output-directory", "odir", "relocatable-device-code", "rdc", "x"),
    **_all(_OUTPUT, "generate-dependencies", "M", "generate-nonsystem-dependencies", "MM", "lto", "dlink-time-opt"),
    **_all(_OUTPUT, "dlto", "gen-opt-lto", "dryrun", "clean-targets", "clean", "fdevice-syntax-only", "version", "V"),
    **_all(_OUTPUT, "help", "h", "list-gpu-code", "code-ls", "list-gpu-arch", "arch-ls", "relocatable-ptx"),
    **_all(_PASSED_ON, "Xcicc", "Xnvvm", "Xopencc", "Xcudafe"),
}
_REFUSED_BY_PTXAS: Mapping[str, str] = {
    **_all(_ROUNDING, "fmad", "optimize-float-atomics", "opt-fp-atomics"),
    **_all(_HIDDEN, "options-file", "optf"),
    **_all(_OUTPUT, "gpu-name", "arch", "machine", "m", "output-file", "o", "compile-only", "c", "entry", "e"),
    **_all(_OUTPUT, "input-as-string", "ias", "version", "V", "help", "h", "list-version", "version-ls"),
    **_all(_SILENCE, "disable-warnings", "w"),
}
_REFUSED_BY_HOST: Mapping[str, str] = _all(
    _ROUNDING, "fast-math", "Ofast", "unsafe-math-optimizations", "finite-math-only"
)


def split_extra(flags: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags for nvcc, and what -Xptxas wraps: nvcc stops at PTX here and would drop those."""
    for_nvcc: list[str] = []
    for_ptxas: list[str] = []
    for name, word, values in _options(flags):
        if name in _PTXAS_WRAPPERS:
            for_ptxas += values
        else:
            for_nvcc.append(word)
            if name in _HOST_WRAPPERS and "=" not in word:
                for_nvcc.append(",".join(values))
    return tuple(for_nvcc), tuple(word for word in for_ptxas if word)


def require_faithful_flags() -> None:
    """KnobError for a flag in DSAGEN_EXTRA_NVCC_FLAGS, or in nvcc's own variables, that is refused; it names both."""
    _require_faithful(knobs.EXTRA_NVCC_FLAGS.name, knobs.EXTRA_NVCC_FLAGS.get())
    environment = knobs.code_changing_environment()
    for variable in FLAG_VARIABLES:
        if variable in environment:
            _require_faithful(variable, _words(environment[variable]))


def _require_faithful(variable: str, flags: Iterable[str]) -> None:
    for name, word, values in _options(flags):
        # -I may be joined to its folder, and no other option begins so.
        found = _REFUSED_BY_NVCC.get("I" if name.startswith("I") else name)
        shown = word
        if name in _PTXAS_WRAPPERS + _HOST_WRAPPERS:
            refused = _REFUSED_BY_PTXAS if name in _PTXAS_WRAPPERS else _REFUSED_BY_HOST
            for value in values:
                inner = _name(value).removeprefix("f") if name in _HOST_WRAPPERS else _name(value)
                if inner in refused:
                    found, shown = refused[inner], f"{word.partition('=')[0]} {value}"
        if found is not None:
            raise KnobError(f"{variable}: {shown!r} is refused: it {found}. Take it out of {variable}.")


def _options(flags: Iterable[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(name without dashes, the word itself, comma-separated values if it wraps flags of another tool)."""
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        name = _name(name) if word.startswith("-") else ""
        if name in _PTXAS_WRAPPERS + _HOST_WRAPPERS:
            yield name, word, (value if equals else next(words, "")).split(",")
        else:
            yield name, word, []


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("-")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # nvcc splits it in its own way; the names are found all the same
        return text.split()
