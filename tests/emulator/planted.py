"""Faults that are planted in the CUDA text of kernels, and what the emulator says of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from decode import Kernel
from ptx_texts import compile_ptx

from dsagen.errors import EmulatorError
from dsagen.render import render


def faulty(kernel: Kernel, *places: str) -> Kernel:
    """The kernel with places of its CUDA text replaced: a text, what stands there instead, and so on."""
    source = render(kernel.plan).text
    for text, replacement in zip(places[::2], places[1::2], strict=True):
        assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
        source = source.replace(text, replacement)
    return replace(kernel, ptx=compile_ptx(source, kernel.plan.variant.arch))


def said(run: Callable[[], object]) -> str:
    """What the machine says when it stops: it names the kernel, both lines and the thread."""
    with pytest.raises(EmulatorError) as caught:
        run()
    message = str(caught.value)
    assert re.search(r"dsa_\w+: .*\n  at PTX line \d+, CUDA line \d+, thread \d+", message), message
    return message


def a_race(message: str, of: str) -> bool:
    """Whether the message is of a race, with the other thread and the line where that was."""
    other = r"which CTA \(\d+, 0, 0\) warp \d+, lane \d+ (reads|writes) .*\(PTX line \d+, CUDA line \d+.*nothing orders"
    return re.search(rf"race: .* of {of}, {other}", message) is not None
