"""What identifies a compiled kernel: flags, the source key, and the key with the compiler in it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dsagen import knobs
from dsagen.build.flags import require_faithful_flags, split_extra
from dsagen.build.unit import Unit

# Raised when the meaning of an entry changes; it is part of every key and names the folder below the store's root.
SCHEMA_VERSION = 1
NAME_HEX_DIGITS = 12


@dataclass(frozen=True)
class CompileFlags:
    """The flags of the two steps: CUDA to PTX by nvcc, PTX to cubin by ptxas."""

    nvcc: tuple[str, ...]
    ptxas: tuple[str, ...]


def compile_flags(arch: str) -> CompileFlags:
    """The flags for one arch such as "sm_90a", DSAGEN_EXTRA_NVCC_FLAGS included; KnobError for a refused one."""
    number = arch.removeprefix("sm_")
    require_faithful_flags()
    nvcc_extra, ptxas_extra = split_extra(knobs.EXTRA_NVCC_FLAGS.get())
    return CompileFlags(
        nvcc=("-std=c++17", "-ptx", f"-gencode=arch=compute_{number},code=sm_{number}", "-lineinfo", *nvcc_extra),
        # -v prints the figures that the report is read from; the two warnings name the function at fault.
        ptxas=(f"-arch={arch}", "-m64", "-v", "-warn-spills", "-warn-lmem-usage", "--generate-line-info", *ptxas_extra),
    )


def canonical_json(value: Any) -> str:
    """One text per JSON value: sorted keys, no spaces; a value that JSON cannot hold raises TypeError or ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def source_key(unit: Unit) -> str:
    """64 hex digits over everything but the compiler's version, so that a machine without nvcc can find an entry."""
    flags = compile_flags(unit.arch)
    content = {
        "schema": SCHEMA_VERSION,
        "slug": unit.slug,
        "symbol": unit.symbol,
        "arch": unit.arch,
        "variant": dict(unit.variant),
        "plan": dict(unit.plan),
        "text": unit.text,
        "nvcc_flags": flags.nvcc,
        "ptxas_flags": flags.ptxas,
        "environment": knobs.code_changing_environment(),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def entry_key(source: str, nvcc_version: str) -> str:
    """64 hex digits over the source key and the compiler's version."""
    return hashlib.sha256(f"{source} nvcc {nvcc_version}".encode()).hexdigest()


def entry_name(slug: str, key: str) -> str:
    """The folder name of an entry: `<slug>.<first 12 hex digits of the key>`."""
    return f"{slug}.{key[:NAME_HEX_DIGITS]}"
