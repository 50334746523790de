"""Attention of 64 heads by three warpgroups (programs/attention.cu): its PTX, inputs, launch and expected output."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from ptx_texts import kept_ptx

from dsagen.emulator import Memory, launch

HEADS, DIMS, VALUES, RECORD, THREADS = 64, 576, 512, 656, 384
SMEM_BYTES = 3 * HEADS * DIMS * 2 + 32
SCALE = 0.05


def _product(columns: int, a_registers: bool) -> str:
    """Inline PTX of m64nNk16 on d, a and b."""
    results = columns // 2
    names = ", ".join(f"%{n}" for n in range(results))
    if a_registers:
        a, inputs, tail = ", ".join(f"%{results + n}" for n in range(4)), [f'"r"(a[{n}])' for n in range(4)], "1, 1, 1"
        a, b, adds = f"{{{a}}}", f"%{results + 4}", "1"
        inputs.append('"l"(b)')
    else:
        a, b, adds = f"%{results}", f"%{results + 1}", f"%{results + 2}"
        inputs, tail = ['"l"(a)', '"l"(b)', '"r"(adds)'], "1, 1, 0, 0"
    outputs = ", ".join(f'"+f"(d[{n}])' for n in range(results))
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    body = f"{{\\n.reg .pred p;\\nsetp.ne.b32 p, {adds}, 0;\\n{opcode} {{{names}}}, {a}, {b}, p, {tail};\\n}}"
    return f'asm volatile("{body}" : {outputs} : {", ".join(inputs)} : "memory");'


@cache
def text() -> str:
    """The kernel's PTX."""
    source = (Path(__file__).parent / "programs" / "attention.cu").read_text()
    source = source.replace("@scores@", _product(64, False)).replace("@values@", _product(256, True))
    return kept_ptx(source, "sm_90a")


@dataclass(frozen=True)
class Inputs:
    """Records of keys, ids [tokens, count], and queries in bf16 [tokens, 64, 576] as raw bits."""

    records: np.ndarray
    ids: np.ndarray
    query: np.ndarray


def inputs_of(tokens: int, count: int, seed: int = 0) -> Inputs:
    """Random ones; as many records as ids."""
    random = np.random.default_rng(seed)
    records = np.zeros((count, RECORD), np.uint8)
    # Neither NaN nor very large codes.
    records[:, :VALUES] = random.integers(0, 256, (count, VALUES), np.uint8) & 0xBF
    records[:, VALUES : VALUES + 16] = random.uniform(0.2, 0.6, (count, 4)).astype(np.float32).view(np.uint8)
    records[:, VALUES + 16 :] = _bf16(random.standard_normal((count, DIMS - VALUES))).view(np.uint8)
    ids = random.integers(0, count, (tokens, count)).astype(np.int32)
    return Inputs(records, ids, _bf16(random.standard_normal((tokens, HEADS, DIMS))))


def _bf16(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _wide(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(inputs: Inputs, **options: int | str) -> np.ndarray:
    """The output [tokens, 64, 512]."""
    tokens, count = inputs.ids.shape
    memory, out = Memory(), np.zeros((tokens, HEADS, VALUES), np.float32)
    arrays = {"keys": inputs.records, "ids": inputs.ids, "query": inputs.query, "out": out}
    addresses = [memory.add(name, array, writable=array is out) for name, array in arrays.items()]
    params = struct.pack("<4Qif", *addresses, count, SCALE * 1.4426950408889634)
    launch(text(), "attention", tokens, THREADS, params, SMEM_BYTES, memory, **options)  # type: ignore[arg-type]
    return out


def expected(inputs: Inputs) -> np.ndarray:
    """The same in fp64, from keys as they are rounded to bf16."""
    codes = inputs.records[:, :VALUES].astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    scales = np.ascontiguousarray(inputs.records[:, VALUES : VALUES + 16]).view(np.float32)
    values = np.where(codes & 128, -size, size).astype(np.float32) * np.repeat(scales, 128, axis=1)
    bits = values.view(np.uint32)
    rounded = _wide(bits + 0x7FFF + (bits >> 16 & 1) >> 16)
    rope = _wide(np.ascontiguousarray(inputs.records[:, VALUES + 16 :]).view(np.uint16))
    keys = np.concatenate([rounded, rope], axis=1)[inputs.ids]
    scores = np.einsum("thd,tkd->thk", _wide(inputs.query), keys) * SCALE
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("thk,tkd->thd", shares, keys[..., :VALUES])
