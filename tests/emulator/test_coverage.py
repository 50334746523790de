"""Every kernel that a shipped spec builds consists of instructions that the emulator has.

All kernels for one arch of each class of matrix instructions, and a part of them, not the same, for each other arch,
which has the same PTX but for the arch's name; `--all-mutants` takes all for all.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from decode import compile_ptx

from dsagen.arch import ARCHS
from dsagen.emulator import coverage
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.spec import load_spec
from dsagen.spec_source import shipped_specs

pytestmark = pytest.mark.compile


def rendered(arch: str) -> dict[str, str]:
    """CUDA texts of all kernels of the shipped specs for an arch, by slug."""
    plans = [plan for name in shipped_specs() for plan in expand(load_spec(name).replace(archs=[arch])).plans()]
    return {plan.slug: render(plan).text for plan in plans}


def ptx_of(text: str, arch: str) -> str:
    """PTX of a CUDA text, kept over runs."""
    key = hashlib.sha256(f"{arch}\n{text}".encode()).hexdigest()[:24]
    kept = Path(tempfile.gettempdir()) / f"dsagen-emulator-{os.getuid()}" / f"kernel-{key}.ptx"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, suffix=".partial", delete=False) as file:
            file.write(compile_ptx(text, arch))
        Path(file.name).replace(kept)
    return kept.read_text()


# The first arch of each class of matrix instructions.
FIRST = {row.mma_class: name for name, row in reversed(ARCHS.items())}.values()


# Of the kernels, one in so many for archs that are not the first.
PART = 6


@pytest.mark.parametrize("arch", ARCHS)
def test_every_shipped_kernel(arch: str, request: pytest.FixtureRequest) -> None:
    texts = rendered(arch)
    assert len(texts) > 4
    if arch not in FIRST and not request.config.getoption("--all-mutants"):
        texts = {slug: texts[slug] for slug in sorted(texts)[list(ARCHS).index(arch) % PART :: PART]}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(texts, pool.map(lambda text: coverage(ptx_of(text, arch)), texts.values()), strict=True))
    assert {slug: missing for slug, missing in found.items() if missing} == {}
