"""PTX text cut into statements, labels and braces, each with its place in the PTX and in the CUDA sources."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dsagen.errors import EmulatorError

NAME = r"[A-Za-z_$%][\w$]*"
FUNCTION = re.compile(
    rf"(?:\.(?:visible|extern|weak)\s+)*\.(?P<kind>entry|func)\s+(?:\.noreturn\s+)?"
    rf"(?:\((?P<results>[^)]*)\)\s*)?(?P<name>{NAME})\s*(?:\((?P<params>[^)]*)\))?",
    re.ASCII,
)
_LABEL = re.compile(rf"({NAME})\s*:(?!:)", re.ASCII)
_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BLANK = re.compile(r"\s+")
# These end with their line.
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file|version|target|address_size|section)\b")
_LOC = re.compile(
    r"\.loc\s+(\d{1,9})\s+(\d{1,9})\b(?:\s+(\d{1,9}))?"
    r"(?:.*?\binlined_at\s+(\d{1,9})\s+(\d{1,9})\b(?:\s+(\d{1,9}))?)?",
    re.ASCII,
)
_FILE = re.compile(r'\.file\s+(\d{1,9})\s+"([^"]*)"', re.ASCII)
_TARGET = re.compile(r"\.target\s+(\w+)", re.ASCII)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?\Z", re.ASCII)
_REAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?\Z", re.ASCII)


@dataclass(frozen=True)
class Location:
    """A line of a CUDA source, and the lines whose calls were inlined around it, innermost first."""

    file: int = 0
    line: int = 0
    callers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What stands at a line: kind is "statement", "label", "open" or "close"."""

    kind: str
    text: str
    line: int
    location: Location


class Scanner:
    """Cuts a text into pieces. `target` and `files` (number to path) are known once the pieces have been read."""

    def __init__(self, text: str) -> None:
        # Comments become blanks of as many lines; strings stay.
        self._text = _COMMENT.sub(_without_comment, text)
        self.target = ""
        self.files: dict[int, str] = {}
        self._location = Location()
        # Where each place was inlined, for the chains of .loc.
        self._callers: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

    def pieces(self) -> Iterator[Piece]:
        """The pieces in order. A function's header comes with its opening brace, whatever lies between."""
        text, at, line, size = self._text, 0, 1, len(self._text)
        while True:
            blank = _BLANK.match(text, at)
            if blank is not None:
                line += text.count("\n", at, blank.end())
                at = blank.end()
            if at >= size:
                return
            if text[at] in "{}":
                yield Piece("open" if text[at] == "{" else "close", text[at], line, self._location)
                at += 1
            elif text[at] == ";":
                at += 1
            elif text[at] == "." and _LINE_DIRECTIVE.match(text, at) is not None:
                end = self._line_directive(at, line)
                line += text.count("\n", at, end)
                at = end
            elif (label := _LABEL.match(text, at)) is not None:
                yield Piece("label", label[1], line, self._location)
                line += text.count("\n", at, label.end())
                at = label.end()
            else:
                end = _statement_end(text, at, line)
                yield Piece("statement", text[at:end].strip(), line, self._location)
                line += text.count("\n", at, end)
                at = end + 1 if text[end - 1] != "{" else end

    def _line_directive(self, at: int, line: int) -> int:
        text = self._text
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text.startswith(".section", at):
            # Debug data, without semicolons.
            end = text.find("}", at) + 1
            if end == 0:
                raise EmulatorError(f"PTX line {line}: .section without an end")
        elif (loc := _LOC.match(text, at, end)) is not None:
            self._locate(loc)
        elif (file := _FILE.match(text, at, end)) is not None:
            self.files[int(file[1])] = file[2]
        elif (target := _TARGET.match(text, at, end)) is not None:
            self.target = target[1]
        return end

    def _locate(self, loc: re.Match[str]) -> None:
        file, number, column = int(loc[1]), int(loc[2]), int(loc[3] or 0)
        callers: tuple[tuple[int, int], ...] = ()
        if loc[4] is not None:
            caller = (int(loc[4]), int(loc[5]), int(loc[6] or 0))
            callers = (caller[:2], *self._callers.get(caller, ()))[:16]
        self._callers[file, number, column] = callers
        # Line 0 means none in particular.
        if number != 0:
            self._location = Location(file, number, callers)


def _without_comment(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else " " + "\n" * text.count("\n")


def _statement_end(text: str, at: int, line: int) -> int:
    """Where the statement ends: at its semicolon, or past the brace that opens a function."""
    semicolon = text.find(";", at)
    if text[at] == "." and FUNCTION.match(text, at) is not None:
        brace = text.find("{", at)
        if brace >= 0 and (semicolon < 0 or brace < semicolon):
            return brace + 1
    if semicolon < 0:
        raise EmulatorError(f"PTX line {line}: no semicolon after {text[at : at + 60]!r}")
    return semicolon


def body(pieces: Iterator[Piece], line: int) -> Iterator[Piece]:
    """The pieces up to the brace that closes the one already seen."""
    depth = 1
    for piece in pieces:
        depth += (piece.kind == "open") - (piece.kind == "close")
        if depth == 0:
            return
        yield piece
    raise EmulatorError(f"PTX line {line}: its {{ is never closed")


def split(text: str) -> list[str]:
    """Operands at the commas outside of brackets and braces."""
    if not ("[" in text or "{" in text or "(" in text):
        return text.split(",")
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return parts


def integer(text: str) -> int | None:
    """An integer's value, or the bit pattern of 0f and 0d; None for other text."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        digits = text[2:]
        return int(digits, 16) if re.fullmatch("[0-9a-fA-F]{8}|[0-9a-fA-F]{16}", digits) else None
    if _INTEGER.match(text) is None:
        return None
    digits = text.removesuffix("U")
    sign, digits = (-1, digits[1:]) if digits.startswith("-") else (1, digits)
    if len(digits) > 66:
        return None
    if digits[:2] in ("0x", "0X", "0b", "0B"):
        return sign * int(digits, 0)
    return sign * int(digits, 8 if digits.startswith("0") and len(digits) > 1 else 10)


def real(text: str) -> int | None:
    """The bits of a number with a decimal point, as a double; None for other text."""
    if _REAL.match(text) is None:
        return None
    return int.from_bytes(struct.pack("<d", float(text)), "little")
