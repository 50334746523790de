"""A launch that stops wherever it is told to, and shows what is in its registers and memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Unpack

from dsagen.emulator.launch import SessionOptions, prepare
from dsagen.emulator.library import load_library
from dsagen.emulator.memory import Memory
from dsagen.emulator.program import RegisterPlace
from dsagen.errors import EmulatorError

_LANES = 32
_RUNS, _FAULTED = 0, 1


@dataclass(frozen=True)
class Lanes:
    """Where the lanes of a warp are: PTX and CUDA line of the next instruction, None for lanes that have exited.

    `runnable` and `waiting` are bit masks; waiting are lanes at a warp-wide instruction whose partners have not come.
    """

    ptx_lines: tuple[int | None, ...]
    cuda_lines: tuple[int | None, ...]
    runnable: int
    waiting: int


class Session:
    """A launch under control, a context manager. It takes the arguments of `launch`, and repeats exactly.

        with Session(ptx, "kernel", grid, threads, params, smem_bytes, memory, seed=3) as session:
            session.step(cta=0, warp=2, instructions=40)
            session.register("%r5", cta=0, warp=2)

    CTAs are named by their number in the grid; those that are resident can be looked at. EmulatorError for a CTA, warp
    or register that is not there, and for what a kernel must not do.
    """

    def __init__(
        self,
        ptx: str,
        entry: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        params: bytes,
        smem_bytes: int,
        memory: Memory,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._library = load_library(options.get("library_folder")).handle
        self._ready = prepare(ptx, entry, grid, block, params, smem_bytes, memory, **options)
        self._handle: int | None = self._library.vm_open(ctypes.byref(self._ready.block))
        self._finished = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the launch holds. It cannot go on afterwards."""
        if self._handle is not None:
            self._library.vm_close(self._handle)
        self._handle = None

    @property
    def finished(self) -> bool:
        """Whether all CTAs of the grid have."""
        return self._finished

    def turn(self) -> bool:
        """Let every warp of the resident CTAs have its turn, as the schedule has it; False once all have finished."""
        self._finished = self._did(self._library.vm_turn(self._open())) is False
        return not self._finished

    def run(self) -> None:
        """Run to the end."""
        while self.turn():
            pass

    def step(self, cta: int, warp: int, instructions: int = 1) -> int:
        """Run some instructions of one warp and no other; how many it did before it had to wait or was done.

        Of lanes that have parted, those that are furthest behind run.
        """
        self._require(cta, warp)
        for done in range(instructions):
            if not self._library.vm_is_resident(self._open(), cta):
                return done
            if not self._did(self._library.vm_step(self._open(), cta, warp)):
                return done
        return instructions

    def land(self, cta: int) -> bool:
        """Let all asynchronous copies of a CTA land; whether there were any."""
        self._require(cta, 0)
        return self._did(self._library.vm_land(self._open(), cta))

    def lanes(self, cta: int, warp: int) -> Lanes:
        """Where the lanes of a warp are."""
        out = self._lanes(cta, warp)
        program, live = self._ready.program, out[_LANES]
        pcs = [out[lane] if live >> lane & 1 else None for lane in range(_LANES)]
        ptx = tuple(None if pc is None else program.ptx_lines[pc] for pc in pcs)
        cuda = tuple(None if pc is None else program.cuda_lines[pc] for pc in pcs)
        return Lanes(ptx, cuda, out[33], out[34])

    def register(self, name: str, cta: int, warp: int) -> tuple[int, ...]:
        """The bits of a PTX register in each lane; of a predicate 0 or 1.

        A register holds a value only between its first write and its last read: elsewhere its place may be another's,
        and EmulatorError says so.
        """
        place = self._place(name, self._lanes(cta, warp))
        if place.bits == 0:
            word = self._library.vm_predicate(self._open(), cta, warp, place.slot)
            return tuple(word >> lane & 1 for lane in range(_LANES))
        rows = [self._slot(cta, warp, place.slot + n) for n in range(2 if place.bits == 64 else 1)]
        return tuple(sum(row[lane] << 32 * n for n, row in enumerate(rows)) for lane in range(_LANES))

    def shared(self, cta: int) -> bytes:
        """The shared memory of a CTA."""
        self._require(cta, 0)
        out = ctypes.create_string_buffer(max(self._ready.block.shared_bytes, 1))
        self._library.vm_shared(self._open(), cta, out)
        return out.raw[: self._ready.block.shared_bytes]

    def _open(self) -> int:
        if self._handle is None:
            raise EmulatorError("the session is closed")
        return self._handle

    def _did(self, status: int) -> bool:
        if status == _FAULTED:
            raise self._ready.error()
        return status == _RUNS

    def _require(self, cta: int, warp: int) -> None:
        block = self._ready.block
        warps = -(-block.block[0] * block.block[1] * block.block[2] // _LANES)
        if not 0 <= warp < warps:
            raise EmulatorError(f"warp {warp}: a CTA has {warps}")
        if cta < 0 or not self._library.vm_is_resident(self._open(), cta):
            raise EmulatorError(f"CTA {cta} is not resident: it has not started, has finished, or is not in the grid")

    def _lanes(self, cta: int, warp: int) -> list[int]:
        self._require(cta, warp)
        out = (ctypes.c_uint32 * (_LANES + 3))()
        self._library.vm_lanes(self._open(), cta, warp, out)
        return list(out)

    def _slot(self, cta: int, warp: int, slot: int) -> list[int]:
        out = (ctypes.c_uint32 * _LANES)()
        self._library.vm_slot(self._open(), cta, warp, slot, out)
        return list(out)

    def _place(self, name: str, lanes: list[int]) -> RegisterPlace:
        places = self._ready.program.registers.get(name)
        if places is None:
            raise EmulatorError(f"{self._ready.program.entry} uses no register {name}")
        pcs = [lanes[lane] for lane in range(_LANES) if lanes[_LANES] >> lane & 1]
        alive = [place for place in places if all(place.first < pc <= place.last for pc in pcs)]
        if len(alive) != 1:
            why = "holds no value" if not alive else "is the name of several registers"
            raise EmulatorError(f"register {name} {why} where the warp is")
        return alive[0]
