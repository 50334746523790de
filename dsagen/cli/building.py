"""`dsagen build`, `dsagen render` and `dsagen compile-commands`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import (
    arch_option,
    json_option,
    matrix_lines,
    quiet_option,
    render_units,
    select,
    specs_argument,
)
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import BuildError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.build import BuildResult
    from dsagen.build.unit import Unit

_OUT_HELP = "Folder that gets generated/<arch>/<slug>.cu.  [default: the current one]"


@click.command()
@specs_argument()
@arch_option
@click.option("--out", type=NamedPath(path_type=Path), default=Path(), help=_OUT_HELP)
@click.option("--jobs", type=click.IntRange(min=1), help="Most compiles at once.  [default: by cores and memory]")
@click.option("--force", is_flag=True, help="Compile also what is in the store.")
@quiet_option
@json_option
def build(
    specs: tuple[str, ...],
    archs: tuple[str, ...],
    out: Path,
    jobs: int | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile every kernel that the SPECs can reach into the kernel store.

    Prints what will and what cannot be built before anything compiles. Needs nvcc for what is not in the store yet.
    """
    from dsagen.build import Store, build_units, make_progress

    start = time.monotonic()
    selections = select(specs, archs)
    if not (quiet or as_json):
        echo_lines(matrix_lines(selections))
    units = render_units(selections)
    _write(units, out)
    progress = make_progress(quiet or as_json)
    results = build_units(units, Store.open(), progress=progress, jobs=jobs, force=force)
    seconds = time.monotonic() - start
    if as_json:
        echo_json({"kernels": [_result_json(result) for result in results], "seconds": round(seconds, 3)})
    elif not quiet:
        echo_lines(_summary(results, seconds))


@click.command()
@specs_argument()
@arch_option
@click.option("--out", type=NamedPath(path_type=Path), default=Path(), help=_OUT_HELP)
@quiet_option
@json_option
def render(specs: tuple[str, ...], archs: tuple[str, ...], out: Path, quiet: bool, as_json: bool) -> None:
    """Write the complete CUDA text of every kernel of the SPECs, without compiling it."""
    units = render_units(select(specs, archs))
    paths = _write(units, out)
    if as_json:
        files = [
            {"slug": unit.slug, "symbol": unit.symbol, "arch": unit.arch, "path": str(path)}
            for unit, path in zip(units, paths, strict=True)
        ]
        echo_json({"files": files})
    elif not quiet:
        echo_lines(str(path) for path in paths)


@click.command("compile-commands")
@specs_argument()
@arch_option
@click.option("--out", type=NamedPath(path_type=Path), default=Path(), help=_OUT_HELP)
@quiet_option
@json_option
def compile_commands(specs: tuple[str, ...], archs: tuple[str, ...], out: Path, quiet: bool, as_json: bool) -> None:
    """Write the CUDA text of every kernel of the SPECs, and compile_commands.json beside it for editors and clangd.

    Each command is the first step of a build, from the text to PTX. Needs nvcc, and runs nothing.
    """
    from dsagen.build import find_toolchain
    from dsagen.build.compile import ptx_arguments

    units = render_units(select(specs, archs))
    toolchain = find_toolchain()
    folder = out.absolute()
    rows = []
    for unit, path in zip(units, _write(units, out), strict=True):
        name = str(path.absolute().relative_to(folder))
        output = str(Path(name).with_suffix(".ptx"))
        arguments = ptx_arguments(unit.arch, toolchain, name, output)
        rows.append({"directory": str(folder), "file": name, "arguments": arguments, "output": output})
    database = out / "generated" / "compile_commands.json"
    _replace_text(database, json.dumps(rows, indent=1) + "\n")
    if as_json:
        echo_json({"path": str(database), "commands": rows})
    elif not quiet:
        echo_lines([str(database)])


def _write(units: Sequence[Unit], out: Path) -> list[Path]:
    from dsagen.build import write_generated

    with _told_as_output(out):
        return write_generated(units, out)


def _replace_text(path: Path, text: str) -> None:
    """Write a file, in one step for those who read it meanwhile."""
    with _told_as_output(path.parent):
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.replace(path)


@contextlib.contextmanager
def _told_as_output(out: Path) -> Iterator[None]:
    """An OSError inside is told as what it is: a place that cannot be written."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise BuildError(
            f"generated CUDA text cannot be written below {out.absolute()}: {error.strerror}{where}: "
            "name a folder that can be written with --out"
        ) from None


def _summary(results: Sequence[BuildResult], seconds: float) -> list[str]:
    rows = []
    for result in results:
        report, plan = result.entry.report, result.entry.plan
        rows.append(
            [
                result.entry.slug,
                f"{report['registers']} registers",
                f"{plan['smem_bytes']} B shared",
                "cached" if result.was_cached else f"{result.seconds:.2f} s",
            ]
        )
    compiled = sum(not result.was_cached for result in results)
    roots = sorted({str(result.entry.path.parent) for result in results})
    return [
        *aligned(rows),
        f"{quantity(len(results), 'kernel')} in {', '.join(roots)}: {compiled} compiled, "
        f"{len(results) - compiled} cached, {seconds:.1f} s",
    ]


def _result_json(result: BuildResult) -> dict[str, Any]:
    entry = result.entry
    return {
        "slug": entry.slug,
        "symbol": entry.symbol,
        "arch": entry.arch,
        "path": str(entry.path),
        "cached": result.was_cached,
        "seconds": round(result.seconds, 3),
        "nvcc": entry.nvcc_version,
        "smem_bytes": entry.plan["smem_bytes"],
        "report": dict(entry.report),
    }
