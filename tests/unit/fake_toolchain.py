"""Stand-ins for nvcc and ptxas, shell scripts that obey the same command lines, and units to compile with them."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsagen import knobs
from dsagen.build import Store, build_units, find_toolchain, toolchain

GOOD_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'dsa_fake' for 'sm_90a'
ptxas info    : Function properties for dsa_fake
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 512 bytes smem, 400 bytes cmem[0]
"""


@dataclass(frozen=True)
class FakeUnit:
    slug: str = "fake.sm90a.x"
    symbol: str = "dsa_fake"
    arch: str = "sm_90a"
    text: str = 'extern "C" __global__ void dsa_fake() {}\n'
    variant: dict[str, Any] = field(default_factory=lambda: {"family": "fake", "heads": 16})
    plan: dict[str, Any] = field(default_factory=lambda: {"tile": [64, 64]})


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
    return path


def write_toolchain(
    folder: Path,
    version: str = "13.0.88",
    ptxas_version: str | None = None,
    before_nvcc: str = "",
    before_ptxas: str = "",
    log: str = GOOD_LOG,
) -> Path:
    """Write `<folder>/bin/nvcc` and its ptxas; `before_*` is shell text run in a compile. The path of nvcc.

    Each compile appends a line to `<folder>/compiled`, each version query one to `<folder>/asked`.
    """
    write_script(
        folder / "bin" / "nvcc",
        f'if [ "$1" = --version ]; then echo x >> {shlex.quote(str(folder / "asked"))}; '
        f"echo 'Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}'; exit 0; fi\n"
        f"if [ \"$1\" = --dryrun ]; then echo '#$ _HERE_={folder / 'bin'}' >&2; exit 0; fi\n"
        f"echo x >> {shlex.quote(str(folder / 'compiled'))}\n{before_nvcc}\n"
        f'printf \'.version 9.0\\n\\t.file\\t1 "%s/kernel.cu"\\n\' "$PWD" > kernel.ptx\n',
    )
    write_script(
        folder / "bin" / "ptxas",
        f'if [ "$1" = --version ]; then echo "V{ptxas_version or version}"; exit 0; fi\n{before_ptxas}\n'
        f"cat <<'END'\n{log}END\nprintf '\\177ELF' > kernel.cubin\ncat kernel.ptx >> kernel.cubin\n",
    )
    return folder / "bin" / "nvcc"


def compiles(folder: Path) -> int:
    path = folder / "compiled"
    return len(path.read_text().splitlines()) if path.exists() else 0


def bare_path(folder: Path, *extra: Path) -> str:
    """A PATH with a host compiler and a shell's tools but no nvcc, whatever the machine has."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "sed", "mv", "cat", "sleep", "kill", "gcc", "g++"):
        found = shutil.which(name)
        if found and not (tools / name).exists():
            (tools / name).symlink_to(found)
    return ":".join(str(path) for path in (*extra, tools))


def install_kit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A fake toolkit that DSAGEN_NVCC names, and a store folder of the test's own; the kit's folder."""
    for name in ("DSAGEN_EXTRA_NVCC_FLAGS", "CUDA_HOME", "CUDA_PATH", *knobs.CODE_CHANGING_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", bare_path(folder))
    monkeypatch.setenv("DSAGEN_NVCC", str(write_toolchain(folder / "kit")))
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(folder / "store"))
    toolchain.clear_version_cache()
    return folder / "kit"


def build_in_process(units: list[FakeUnit]) -> list[tuple[str, bool]]:
    """Body of a child process: build in the environment's store; (entry name, was it there already) for each."""
    return [(result.entry.name, result.was_cached) for result in build_units(units, Store.open(), find_toolchain)]
