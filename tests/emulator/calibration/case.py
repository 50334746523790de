"""A micro-kernel with its inputs, how it is run on the emulator, and when two results of it agree."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.tensor_map import TensorMap

THREADS = 128


@dataclass(frozen=True)
class Tiled:
    """A tensor map of one of a case's arrays, the last of which is the output: see dsagen.tensor_map.

    With a `width` its rows hold so many elements, and the rest of the array's rows is not of the tensor.
    """

    array: int
    element: str
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle_bytes: int = 0
    fill: str = "zeros"
    width: int = 0

    def of(self, array: np.ndarray, address: int) -> TensorMap:
        """The map of this array, whose last axis is the fastest."""
        strides = array.strides[-2::-1] if array.ndim > 1 else ()
        how = (self.element_strides, self.swizzle_bytes, 0, self.fill)
        sizes = (self.width or array.shape[-1], *array.shape[-2::-1])
        return TensorMap(self.element, address, sizes, strides, self.box, *how)


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel `k` of 64-bit pointers: to each input in order, then to the output, which holds `before`, or zeros.

    With `tiled` a tensor map of 128 bytes comes first. `cluster` CTAs make one.

    `within` is how far results may be apart: 0 to the bit, NaN being equal to any other; else relative to each value,
    or, where `of_largest` is set, to the largest one; and in any case up to `apart`. `refused`: the emulator declines
    the kernel with this text, so that the record only tells what silicon makes of it. `model` is what silicon makes of
    it to the bit, where that is known and the emulator is near it only.
    """

    name: str
    ptx: str
    inputs: tuple[np.ndarray, ...]
    shape: tuple[int, ...]
    dtype: str
    threads: int = THREADS
    grid: int = 1
    within: float = 0.0
    of_largest: bool = False
    apart: float = 0.0
    refused: str = ""
    tiled: Tiled | None = None
    cluster: int = 1
    before: np.ndarray | None = None
    model: Callable[[], np.ndarray] | None = None

    @property
    def key(self) -> str:
        """What a record was made of: the text, the inputs and the launch."""
        how = f"{self.grid} {self.threads} {self.cluster} {self.shape} {self.dtype} {self.tiled}"
        digest = hashlib.sha256(f"{self.ptx}\n{how}".encode())
        for array in self.arrays():
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:32]

    def arrays(self) -> list[np.ndarray]:
        """Copies of the inputs, and the output as it is before."""
        out = np.zeros(self.shape, self.dtype) if self.before is None else self.before.reshape(self.shape)
        return [np.array(array, order="C") for array in (*self.inputs, out)]

    def tensor_map(self, addresses: Sequence[int]) -> TensorMap | None:
        """The map that the kernel takes, where its arrays lie at these addresses."""
        if self.tiled is None:
            return None
        return self.tiled.of(self.arrays()[self.tiled.array], addresses[self.tiled.array])

    def run_emulated(self) -> np.ndarray:
        """The output as the emulator computes it; EmulatorError where it declines."""
        arrays, memory = self.arrays(), Memory()
        addresses = [memory.add(f"array{n}", array, writable=array is arrays[-1]) for n, array in enumerate(arrays)]
        tensor_map = self.tensor_map(addresses)
        first = struct.unpack("<16Q", tensor_map.encode_for_emulator()) if tensor_map is not None else ()
        values, options = [*first, *addresses], {"cluster": self.cluster} if self.cluster > 1 else {}
        launch(self.ptx, values, memory, threads=self.threads, grid=self.grid, **options)
        return arrays[-1]

    def difference(self, found: np.ndarray, recorded: np.ndarray) -> str:
        """How the results differ by more than they may; empty where they agree."""
        if found.dtype.kind != "f":
            wrong = found != recorded
        else:
            # Wider, so that differences do not overflow; infinities have to be equal.
            a, b = found.astype(np.float64), recorded.astype(np.float64)
            with np.errstate(invalid="ignore"):
                size = np.nanmax(np.abs(b[np.isfinite(b)]), initial=0.0) if self.of_largest else np.abs(b)
                near = np.abs(a - b) <= np.maximum(self.within * size, self.apart)
            same = (found == recorded) & (np.signbit(found) == np.signbit(recorded)) if self.within == 0 else a == b
            wrong = ~(same | near & (self.within != 0) & np.isfinite(a) & np.isfinite(b) | np.isnan(a) & np.isnan(b))
        if not wrong.any():
            return ""
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        return (
            f"{self.name}: {int(wrong.sum())} of {wrong.size} results differ, the first at {at}: {found[at]} here, "
            f"{recorded[at]} on the device"
        )


_TYPE = {1: ("u8", "%h"), 2: ("b16", "%h"), 4: ("b32", "%r"), 8: ("b64", "%d")}


def elementwise(
    name: str, body: str, inputs: Sequence[np.ndarray], dtype: str, within: float = 0.0, elements: int = 0
) -> Case:
    """`body` computes {out} of {a}, {b}, .., an element a thread; `elements` where there are no inputs."""
    count = elements or len(inputs[0])
    assert count % THREADS == 0
    lines = [f"mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, {THREADS}, %r0;"]
    names = {}
    for n, kind in enumerate([*(array.dtype for array in inputs), np.dtype(dtype)]):
        suffix, prefix = _TYPE[kind.itemsize]
        register = f"{prefix}{20 + n}"
        lines.append(f"ld.param.u64 %d{n}, [p{n}]; mad.wide.u32 %d{n}, %r0, {kind.itemsize}, %d{n};")
        if n < len(inputs):
            lines.append(f"ld.global.{suffix} {register}, [%d{n}];")
        names["{" + ("abcd"[n] if n < len(inputs) else "out") + "}"] = register
    for placeholder, register in names.items():
        body = body.replace(placeholder, register)
    last = len(inputs)
    lines += [body, f"st.global.{_TYPE[np.dtype(dtype).itemsize][0]} [%d{last}], {names['{out}']};"]
    text = kernel("\n".join(lines), last + 1)
    return Case(name, text, tuple(inputs), (count,), dtype, grid=count // THREADS, within=within)
