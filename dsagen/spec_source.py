"""Where a spec's text comes from, and its YAML as plain data with the line of every key.

The YAML is a small subset: one mapping of plain scalars, lists and mappings. Tags, anchors, aliases, merge keys,
duplicate keys and several documents are errors, and so is a file too large for a spec; nothing is ever constructed from
a tag. Words such as `off`, `no` and `on` are text, as in YAML 1.2.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsagen.errors import SpecError

MAX_SPEC_BYTES = 64 * 1024
MAX_SPEC_DEPTH = 8
SPEC_SUFFIXES = (".yaml", ".yml", ".json")
_MAX_SHOWN_CHARS = 200

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class SpecSource:
    """A parsed spec text: its data, a label for messages, and the 1-based line of each key path."""

    label: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """`label:line` of a key path, or of its nearest parent that was written."""
        while path and path not in self.lines:
            path = path[:-1]
        line = self.lines.get(path)
        return f"{self.label}:{line}" if line else self.label


def shipped_spec_folder() -> Path:
    """The folder of the specs that come with dsagen: inside an installed wheel, or specs/ of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_data" / "specs"
    return installed if installed.is_dir() else package.parent / "specs"


def shipped_specs() -> dict[str, Path]:
    """The shipped specs by name (file name without suffix), sorted."""
    return {path.stem: path for path in sorted(shipped_spec_folder().glob("*.yaml"))}


def resolve_spec_path(path: str | Path) -> Path:
    """The file that a user means: an existing path, else a shipped spec's name (`v32_h16` or `specs/v32_h16.yaml`).

    SpecError names the nearest shipped specs when there is no such file.
    """
    text = str(path)
    if not text or "\0" in text:
        raise SpecError(f"spec {text!r}: not a path; give a YAML file or one of {', '.join(shipped_specs())}")
    shown = text if text.isprintable() and len(text) <= _MAX_SHOWN_CHARS else f"{text!r:.{_MAX_SHOWN_CHARS}}"
    given, refusal = Path(path), ""
    try:
        if given.is_file():
            return given
        if given.is_dir():
            raise SpecError(f"spec {shown}: is a folder; give one of its files")
        if given.exists():
            refusal = "is no regular file"
        elif given.is_symlink():
            refusal = "is a link to nothing"
    except OSError as error:  # a folder that may not be searched, a name that is too long
        refusal = f"cannot be read: {error.strerror}"
    stem = given.stem if given.suffix in SPEC_SUFFIXES else given.name
    if str(given.parent) in (".", "specs") and stem in shipped_specs():
        return shipped_specs()[stem]
    if refusal:
        raise SpecError(f"spec {shown}: {refusal}; shipped specs are {', '.join(shipped_specs())}")
    nearby = [p.name for p in sorted(given.parent.glob("*.y*ml"))] if given.parent.is_dir() else []
    close = difflib.get_close_matches(given.name, nearby, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(stem, shipped_specs(), n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise SpecError(f"spec {shown}: no such file{hint}; shipped specs are {', '.join(shipped_specs())}")


def read_spec_source(path: Path) -> SpecSource:
    """Read and parse a spec file; SpecError when it cannot be read or is not the YAML described above."""
    label = str(path)
    if path.suffix not in SPEC_SUFFIXES:
        raise SpecError(f"{label}: a spec file ends in {', '.join(SPEC_SUFFIXES)}, not in {path.suffix!r}")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{label}: cannot be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{label}: byte {error.start} is not UTF-8") from None
    return parse_spec_text(text, label)


def parse_spec_text(text: str, label: str = "<spec>") -> SpecSource:
    """Parse a spec's YAML; SpecError names label and line of what is not allowed."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SPEC_BYTES:
        raise SpecError(f"{label}: larger than the {MAX_SPEC_BYTES} bytes that a spec may have")
    try:
        _check_events(text, label)
        node = yaml.compose(text, Loader=_SpecLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label}:{mark.line + 1}" if mark else label
        raise SpecError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{label}: not valid YAML: {' '.join(str(error).split())}") from None
    except SpecError:
        raise
    except (ValueError, OverflowError):
        # The scanner turns escapes and version numbers into Python values without looking at them.
        raise SpecError(
            f"{label}: not valid YAML: an escape such as \\UFFFFFFFF is no character, or a %YAML version no number"
        ) from None
    if node is None:
        raise SpecError(f"{label}: empty; a spec is a mapping such as `model: v32`, one key per line")
    if not isinstance(node, yaml.MappingNode):
        prefix = "the value " if isinstance(node, yaml.ScalarNode) else ""
        raise SpecError(
            f"{label}:{_line(node)}: the top level is {prefix}{_what(node)}, expected a mapping such as `model: v32`"
        )
    lines: dict[KeyPath, int] = {}
    data = _plain(node, (), label, lines)
    return SpecSource(label, data, lines)


class _SpecLoader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's idea of which plain words are not text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (the base's own shape)


_INT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\Z", re.ASCII)
# A number with a leading zero is neither: as text a message shows it as it was written.
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?(?:[eE][-+]?[0-9]{1,3})?\Z", re.ASCII)
_TAG = "tag:yaml.org,2002:"
_SpecLoader.add_implicit_resolver(_TAG + "bool", re.compile(r"(?:true|false)\Z"), list("tf"))
_SpecLoader.add_implicit_resolver(_TAG + "null", re.compile(r"(?:null|~|)\Z"), ["n", "~", ""])
_SpecLoader.add_implicit_resolver(_TAG + "int", _INT, list("-0123456789"))
_SpecLoader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-0123456789"))


def _check_events(text: str, label: str) -> None:
    """Refuse what is never needed in a spec, before anything is composed."""
    depth = documents = 0
    for event in _events(text):
        line = event.start_mark.line + 1 if event.start_mark else 0
        where = f"{label}:{line}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise SpecError(f"{where}: YAML anchors and aliases are not allowed: write the value where it is needed")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise SpecError(f"{where}: YAML tag {tag!r:.80} is not allowed: write plain values")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise SpecError(f"{where}: a second YAML document begins; a file holds one spec")
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_SPEC_DEPTH:
                raise SpecError(f"{where}: nested deeper than {MAX_SPEC_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _events(text: str) -> Iterator[yaml.Event]:
    return iter(yaml.parse(text, Loader=_SpecLoader))


def _what(node: yaml.Node) -> str:
    """A node in words."""
    if isinstance(node, yaml.ScalarNode):
        return f"{node.value!r:.60}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping (text with braces needs quotes)"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _plain(node: yaml.Node, path: KeyPath, label: str, lines: dict[KeyPath, int]) -> Any:
    if path:
        lines.setdefault(path, _line(node))
    if isinstance(node, yaml.MappingNode):
        return _plain_mapping(node, path, label, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), label, lines) for index, item in enumerate(node.value)]
    return _plain_scalar(node)


def _plain_mapping(node: yaml.MappingNode, path: KeyPath, label: str, lines: dict[KeyPath, int]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _plain_scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str) or not key:
            raise SpecError(f"{label}:{_line(key_node)}: a key must be a word, found {_what(key_node)}")
        key_path = (*path, key)
        if key in data:
            dotted = ".".join(map(str, key_path))
            raise SpecError(f"{label}:{_line(key_node)}: duplicate key {dotted!r}, first set in line {lines[key_path]}")
        lines[key_path] = _line(key_node)
        data[key] = _plain(value_node, key_path, label, lines)
    return data


def _plain_scalar(node: yaml.Node) -> Any:
    text, kind = str(node.value), node.tag.removeprefix(_TAG)
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "bool":
        return text == "true"
    return None if kind == "null" else text
