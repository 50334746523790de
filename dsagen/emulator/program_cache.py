"""Programs on disk, so that a kernel's text is read once: by its content, the machine's and that of these modules."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from array import array
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dsagen.emulator.library import Library
from dsagen.emulator.program import ModuleVariable, Program, RegisterPlace

# A shorter text is read as fast as a file.
SHORTEST_TEXT = 16384
_MAGIC = b"dsagen-program-2\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class ProgramCache:
    """The folder beside a machine that holds programs for it."""

    folder: Path
    machine: str

    @classmethod
    def beside(cls, library: Library) -> ProgramCache:
        """The cache of a loaded machine."""
        return cls(library.folder / "programs", library.name)

    def path(self, ptx: str, entry: str) -> Path:
        """Where the program of a kernel is kept."""
        digest = hashlib.sha256()
        for part in (self.machine, _front_end(), entry, ptx):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return self.folder / f"{digest.hexdigest()[:32]}.program"

    def read(self, ptx: str, entry: str) -> Program | None:
        """The kept program; None where there is none, or where the file is not what was written."""
        try:
            data = self.path(ptx, entry).read_bytes()
        except OSError:
            return None
        payload = data[len(_MAGIC) + _DIGEST_BYTES :]
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(payload).digest() != data[len(_MAGIC) :][:_DIGEST_BYTES]:
            return None
        return _unpacked(payload)

    def write(self, ptx: str, entry: str, program: Program) -> None:
        """Keep a program. A folder that cannot be written only costs time, so that is no error."""
        payload = _packed(program)
        path = self.path(ptx, entry)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Others may write the same program: each writes a file of its own, and the last one stays.
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".partial")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink(missing_ok=True)


@cache
def _front_end() -> str:
    """What the modules that make programs say."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _packed(program: Program) -> bytes:
    """A line of JSON with sizes and everything small, then the byte blocks one after the other."""
    lines = (program.args, program.ptx_lines, program.cuda_lines)
    blocks = [program.code, program.preloads, *(block.tobytes() for block in lines)]
    blocks += [variable.initial for variable in program.variables]
    plain = {
        name: getattr(program, name)
        for name in ("entry", "unknown", "slots", "predicates", "param_bytes", "static_shared_bytes", "local_bytes")
    }
    header = plain | {
        "target": program.target,
        "cluster": program.cluster,
        "places": list(program.places.items()),
        "registers": {
            name: [(place.slot, place.bits, place.first, place.last) for place in places]
            for name, places in program.registers.items()
        },
        "variables": [(v.name, v.address, v.writable) for v in program.variables],
        "sizes": [len(block) for block in blocks],
    }
    return json.dumps(header).encode() + b"\n" + b"".join(blocks)


def _unpacked(payload: bytes) -> Program:
    line, _, rest = payload.partition(b"\n")
    header = json.loads(line)
    blocks, at = [], 0
    for size in header.pop("sizes"):
        blocks.append(rest[at : at + size])
        at += size
    code, preloads, args, ptx_lines, cuda_lines, *initials = blocks
    variables = tuple(
        ModuleVariable(name, address, initial, writable)
        for (name, address, writable), initial in zip(header.pop("variables"), initials, strict=True)
    )
    header["unknown"] = tuple(header["unknown"])
    header["places"] = dict(header["places"])
    header["cluster"] = tuple(header["cluster"]) if header["cluster"] else None
    header["registers"] = {
        name: [RegisterPlace(*place) for place in places] for name, places in header["registers"].items()
    }
    return Program(
        code=code, preloads=preloads, args=array("H", args), ptx_lines=array("I", ptx_lines),
        cuda_lines=array("I", cuda_lines), variables=variables, **header,
    )  # fmt: skip
