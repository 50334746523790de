"""Kernels of a few PTX lines: one warp reads arrays of 32 elements, runs a body and writes 32 results."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np

from dsagen import emulator
from dsagen.emulator import Memory

_HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
_SUFFIX = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}
_REGISTER = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}
REGISTERS = ".reg .pred %p<9>;\n.reg .b16 %h<40>;\n.reg .b32 %r<200>;\n.reg .b64 %d<100>;\n"


def kernel(body: str, params: int = 1, declarations: str = "") -> str:
    """A module with one entry `k` of some 64-bit parameters p0, p1, ..; %r0 is the thread."""
    names = ", ".join(f".param .u64 p{n}" for n in range(params))
    return (
        f"{_HEADER}{declarations}\n.visible .entry k({names})\n{{\n{REGISTERS}mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )


# Texts that launches of this process took, for test_every_form.py.
LAUNCHED: set[str] = set()


def launch(text: str, addresses: Sequence[int], memory: Memory, **options: int) -> emulator.Counts:
    """One CTA of one warp, unless `threads` says more."""
    grid, threads = options.pop("grid", 1), options.pop("threads", 32)
    params = struct.pack(f"<{len(addresses)}Q", *addresses)
    LAUNCHED.add(text)
    return emulator.launch(text, "k", grid, threads, params, options.pop("smem", 0), memory, **options)


def compute(body: str, inputs: Sequence[np.ndarray], result: type) -> np.ndarray:
    """`body` reads {a}, {b}, .. and writes {out}, registers of the arrays' width; one element per thread of a CTA."""
    threads = len(inputs[0])
    arrays = [*(np.ascontiguousarray(array) for array in inputs), np.zeros(threads, result)]
    memory = Memory()
    addresses = [memory.add(f"array{n}", array) for n, array in enumerate(arrays)]
    lines, names = [], {}
    for n, array in enumerate(arrays):
        size = array.dtype.itemsize
        register = f"{_REGISTER[size]}{20 + n}"
        lines += [f"ld.param.u64 %d{n}, [p{n}];", f"mad.wide.u32 %d{n}, %r0, {size}, %d{n};"]
        if n < len(inputs):
            lines.append(f"ld.global.{_SUFFIX[size]} {register}, [%d{n}];")
        names["abcdefgh"[n] if n < len(inputs) else "out"] = register
    last = len(arrays) - 1
    text = re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), body)
    store = f"st.global.{_SUFFIX[arrays[last].dtype.itemsize]} [%d{last}], {names['out']};"
    launch(kernel("\n".join([*lines, text, store]), len(arrays)), addresses, memory, threads=threads)
    return arrays[last]
