"""`dsagen doctor`: everything about this machine that a report of trouble should hold."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen import knobs
from dsagen.cli.selection import json_option
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import DsagenError
from dsagen.quantity import quantity
from dsagen.slug import parse_slug

if TYPE_CHECKING:
    from dsagen.families.sparse_decode.choice_table import ChoiceRow

# What a report of trouble needs to know of: what dsagen imports, and the compiler from PyPI.
PACKAGES = (
    "dsagen",
    "torch",
    "cuda-python",
    "cuda-bindings",
    "cuda-toolkit",
    "nvidia-cuda-nvcc",
    "pydantic",
    "jinja2",
    "ninja",
    "click",
)


@dataclass
class Diagnosis:
    """What was found; `problems` are lines that say what to do about each."""

    python: str = ""
    platform: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    devices: dict[str, Any] = field(default_factory=dict)
    toolchain: dict[str, Any] = field(default_factory=dict)
    store: list[dict[str, Any]] = field(default_factory=list)
    choice_tables: list[dict[str, Any]] = field(default_factory=list)
    knobs: list[dict[str, Any]] = field(default_factory=list)
    foreign: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Describe this machine: Python, packages, devices, compiler, store and knobs; paste it into a report.

    Ends with what stands in the way of building or running, if anything does. The exit code is 0 either way.
    """
    diagnosis = diagnose()
    if as_json:
        echo_json(asdict(diagnosis))
    else:
        echo_lines(_lines(diagnosis))


def diagnose() -> Diagnosis:
    """Look at everything; nothing is written, and nothing found missing is an error."""
    result = Diagnosis(
        python=f"{platform.python_version()} ({sys.executable})",
        platform=f"{platform.platform()}, {os.cpu_count()} cores",
        packages={name: _version(name) for name in PACKAGES},
        foreign={name: text for name in knobs.FOREIGN_VARIABLES if (text := knobs.foreign(name)) is not None},
    )
    result.problems += [unknown.message() for unknown in knobs.unknown_knobs()]
    _look_at_knobs(result)
    _look_at_toolchain(result)
    _look_at_store(result)
    _look_at_devices(result)
    _look_at_choice_tables(result)
    return result


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _look_at_knobs(result: Diagnosis) -> None:
    from dsagen.build.flags import require_faithful_flags

    for knob in knobs.all_knobs():
        found = knob.raw()
        row = {
            "name": knob.name,
            "value": found[1] if found else None,
            "default": knob.describe_default(),
            "type": knob.type_name,
            "doc": knob.doc,
        }
        if found and found[0] != knob.name:
            row["read_from"] = found[0]
        try:
            knob.get()
        except DsagenError as error:
            result.problems.append(str(error))
        result.knobs.append(row)
    try:
        require_faithful_flags()
    except DsagenError as error:
        if str(error) not in result.problems:
            result.problems.append(str(error))


def _look_at_toolchain(result: Diagnosis) -> None:
    from dsagen.build import find_toolchain

    compiler = shutil.which("g++", path=knobs.foreign("PATH"))
    result.toolchain["host_compiler"] = compiler
    try:
        toolchain = find_toolchain()
    except DsagenError as error:
        result.problems.append(str(error))
        return
    result.toolchain |= {
        "nvcc": str(toolchain.nvcc),
        "version": toolchain.version,
        "origin": toolchain.origin,
        "ptxas": str(toolchain.ptxas),
        "skipped": list(toolchain.skipped),
    }
    try:
        toolchain.require_host_compiler()
    except DsagenError as error:
        result.problems.append(str(error))


def _look_at_store(result: Diagnosis) -> None:
    from dsagen.build import Store

    try:
        roots = Store.open().roots
    except DsagenError:
        return  # a bad DSAGEN_CACHE_DIR, which is among the problems already
    for root in roots:
        entries = len(Store([root]).entries())
        result.store.append({"root": str(root), "writable": can_write(root), "kernels": entries})
    if not any(row["writable"] for row in result.store):
        listed = ", ".join(row["root"] for row in result.store)
        result.problems.append(
            f"no folder of the kernel store can be written ({listed}): what is not in it cannot be compiled; "
            "set DSAGEN_CACHE_DIR to a folder that can"
        )


def can_write(root: Path) -> bool:
    """Whether a store root can be written, or created where it is missing."""
    try:
        while not root.exists() and root != root.parent:
            root = root.parent
        return root.is_dir() and os.access(root, os.W_OK | os.X_OK)
    except OSError:  # a folder on the way that may not be searched, a name that is too long
        return False


def _look_at_devices(result: Diagnosis) -> None:
    from dsagen.runtime.survey import survey_devices

    survey = survey_devices()
    result.devices = {
        "driver": survey.driver,
        "problem": survey.problem,
        "devices": [asdict(device) for device in survey.devices],
    }
    if survey.problem is not None:
        result.problems.append(f"{survey.problem}: kernels can be built here, not run")


def _look_at_choice_tables(result: Diagnosis) -> None:
    from dsagen.families.sparse_decode.choice_table import read_tables

    try:
        tables = read_tables()
    except DsagenError as error:
        if str(error) not in result.problems:
            result.problems.append(str(error))
        return
    here = {device["name"] for device in result.devices["devices"]}
    for path in tables.files:
        rows = [row for row in tables.rows if row.file == str(path)]
        unused = {why: count for why, count in Counter(_why_unused(row, here) for row in rows).items() if why}
        result.choice_tables.append({"file": str(path), "rows": len(rows), "not_taken": unused})


def _why_unused(row: ChoiceRow, here: Collection[str]) -> str:
    """Why a row of a choice table decides nothing on this machine, empty where it may."""
    from dsagen.family import families
    from dsagen.plan import Variant
    from dsagen.render import render

    slug = parse_slug(row.kernel)
    try:
        plan = families()[slug.family].plan(Variant(*(getattr(slug, part.name) for part in fields(slug))))
    except (DsagenError, ValueError, KeyError):
        return f"no kernel of this dsagen is {row.kernel}"
    if render(plan).evidence_hash != row.text:
        return f"measured with another text of {row.kernel}: run `dsagen tune` again"
    return "" if row.device in here else f"measured on {row.device}, which this machine has not"


def _lines(result: Diagnosis) -> list[str]:
    tools, devices = result.toolchain, result.devices
    nvcc = f"{tools['version']}, {tools['nvcc']} (from {tools['origin']})" if "nvcc" in tools else "none"
    lines = aligned(
        [
            ["python", result.python],
            ["platform", result.platform],
            ["driver", devices["driver"] or "none"],
            ["nvcc", nvcc],
            ["g++", tools["host_compiler"] or "none"],
        ]
    )
    lines += [f"nvcc skipped: {line}" for line in tools.get("skipped", ())]
    lines += _section("devices", [[f"cuda:{d['index']}", d["name"], d["arch"]] for d in devices["devices"]])
    lines += _section("packages", [[name, version or "not installed"] for name, version in result.packages.items()])
    writable = {True: "writable", False: "read only"}
    lines += _section(
        "store", [[row["root"], writable[row["writable"]], quantity(row["kernels"], "kernel")] for row in result.store]
    )
    lines += _section("choice tables", [[row["file"], quantity(row["rows"], "row")] for row in result.choice_tables])
    lines += [
        f"    {count} not taken: {why}" for row in result.choice_tables for why, count in row["not_taken"].items()
    ]
    lines += _section("knobs", [[row["name"], row["value"] or _default_text(row["default"])] for row in result.knobs])
    lines += _section("what they do", [[row["name"], row["type"], row["doc"]] for row in result.knobs])
    lines += _section("other variables that are read", [[name, text] for name, text in result.foreign.items()])
    lines += ["", "problems" if result.problems else "no problems"]
    return lines + [f"  {problem}" for problem in result.problems]


def _default_text(default: str) -> str:
    return default if default == "not set" else f"not set, so {default}"


def _section(title: str, rows: list[list[str]]) -> list[str]:
    return ["", title, *aligned(rows, indent=2)] if rows else []
