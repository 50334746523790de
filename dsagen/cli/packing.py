"""`dsagen bundle` and `dsagen verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen import __version__
from dsagen.cli.completing import complete_files
from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import (
    Selection,
    arch_option,
    describe_spec,
    json_option,
    quiet_option,
    render_units,
    select,
    specs_argument,
)
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import StoreError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.build import StoreEntry
    from dsagen.build.bundle import Bundle

KIB = 1024


@click.command()
@specs_argument()
@arch_option
@click.option("-o", "--output", type=NamedPath(path_type=Path), required=True, help="The bundle's file.")
@click.option("--jobs", type=click.IntRange(min=1), help="Most compiles at once.  [default: by cores and memory]")
@quiet_option
@json_option
def bundle(
    specs: tuple[str, ...], archs: tuple[str, ...], output: Path, jobs: int | None, quiet: bool, as_json: bool
) -> None:
    """Pack every kernel of the SPECs into one file, which `dsagen.load` reads on a machine without a toolkit.

    What the kernel store lacks is compiled first. The file may be moved and renamed; each byte of it is verified
    whenever it is read.
    """
    from dsagen.build import Store, build_units, make_progress
    from dsagen.build.bundle import require_free, write_bundle

    require_free(output)
    selections = select(specs, archs)
    units = render_units(selections)
    results = build_units(units, Store.open(), progress=make_progress(quiet or as_json), jobs=jobs)
    entries = {result.entry.slug: result.entry for result in results}
    packed = write_bundle(output, [_row(selection, entries) for selection in selections], __version__)
    _show([packed], quiet, as_json)


def _row(selection: Selection, entries: dict[str, StoreEntry]) -> tuple[Any, list[str], list[StoreEntry]]:
    archs = list(dict.fromkeys(cell.arch for cell in selection.matrix.cells))
    return selection.spec, archs, [entries[plan.slug] for plan in selection.matrix.plans()]


@click.command()
@click.argument("files", metavar="[BUNDLE]...", nargs=-1, type=NamedPath(path_type=Path), shell_complete=complete_files)
@quiet_option
@json_option
def verify(files: tuple[Path, ...], quiet: bool, as_json: bool) -> None:
    """Verify the BUNDLEs by their checksums and say what is in them; without one, verify the kernel store.

    Anything broken is an error. A broken entry of the store is rebuilt by the next build that needs it, and so are the
    libraries that dsagen compiles for itself, of the emulator and of the launcher, by what loads them.
    """
    if files:
        from dsagen.build.bundle import read_bundle

        _show([read_bundle(path) for path in files], quiet, as_json)
    else:
        _verify_store(quiet, as_json)


def _show(bundles: Sequence[Bundle], quiet: bool, as_json: bool) -> None:
    if as_json:
        echo_json({"bundles": [_bundle_json(found) for found in bundles]})
    elif not quiet:
        echo_lines(line for found in bundles for line in _bundle_lines(found))


def _bundle_lines(found: Bundle) -> list[str]:
    counted = quantity(len(found.kernels), "kernel")
    lines = [f"{found.path}: {counted}, {_size(found.size_bytes)}, packed by dsagen {found.made_by}"]
    for bundled in found.specs:
        lines.append(f"  {bundled.spec.name} ({', '.join(bundled.archs)}): {describe_spec(bundled.spec)}")
    kernels = found.kernels.values()
    rows = [[kernel.stamp.slug, f"nvcc {kernel.stamp.nvcc_version}", _size(len(kernel.cubin))] for kernel in kernels]
    return lines + aligned(rows, indent=4)


def _bundle_json(found: Bundle) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "bytes": found.size_bytes,
        "made_by": found.made_by,
        "specs": [
            {"spec": bundled.spec.to_mapping(), "archs": bundled.archs, "kernels": bundled.kernels}
            for bundled in found.specs
        ],
        "kernels": [
            {
                "name": name,
                "slug": kernel.stamp.slug,
                "arch": kernel.stamp.arch,
                "nvcc": kernel.stamp.nvcc_version,
                "cubin_bytes": len(kernel.cubin),
            }
            for name, kernel in found.kernels.items()
        ],
    }


def _verify_store(quiet: bool, as_json: bool) -> None:
    from dsagen import kept_library
    from dsagen.build import Store

    store = Store.open()
    surveys = [(root, *store.survey(root), *kept_library.survey(root)) for root in store.roots]
    if as_json:
        rows = [
            {
                "root": str(root),
                "whole": [entry.name for entry in whole],
                "broken": broken,
                "set_aside": aside,
                "libraries": libraries,
                "broken_libraries": damaged,
            }
            for root, whole, broken, aside, libraries, damaged in surveys
        ]
        echo_json({"store": rows})
    elif not quiet:
        for root, whole, broken, aside, libraries, damaged in surveys:
            kept = f", {len(aside)} broken ones set aside earlier" if aside else ""
            echo_lines([f"{root}: {quantity(len(whole), 'kernel')} whole, {len(broken)} broken{kept}"])
            if libraries or damaged:
                echo_lines([f"{root}: {quantity(len(libraries), 'library', 'libraries')} whole, {len(damaged)} broken"])
    problems = [
        f"{root}: {name}: {problem}"
        for root, _, broken, _, _, damaged in surveys
        for name, problem in {**broken, **damaged}.items()
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise StoreError(f"{len(problems)} entries of the kernel store are broken:\n  {listed}")


def _size(count: int) -> str:
    return f"{count / KIB:.0f} KiB" if count < KIB * KIB else f"{count / KIB / KIB:.1f} MiB"
