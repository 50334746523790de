"""`dsagen emulate`: kernels on the CPU, without a device: what they do, and which instructions are not handled."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.proving import MAX_SEED, require_cases
from dsagen.cli.selection import Selection, arch_option, json_option, quiet_option, select, specs_argument
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import CheckFailed, EmulatorError, SpecError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.check.emulate import SeedRun
    from dsagen.plan import KernelPlan

_PTX_SUFFIX = ".ptx"


@click.command()
@specs_argument(required=False)
@click.option("--coverage", is_flag=True, help="Run nothing: list the opcodes that the emulator does not handle.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Orders of warps to run.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Replay the inputs of a run.  [default: fresh ones]")
@click.option("--only", metavar="PATTERN", help="Cases whose name matches a shell pattern.")
@arch_option
@quiet_option
@json_option
def emulate(
    specs: tuple[str, ...],
    coverage: bool,
    seeds: int,
    seed: int | None,
    only: str | None,
    archs: tuple[str, ...],
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the quick cases of each SPEC on the emulator, and print what its kernels did.

    Every kernel runs on the CPU from the PTX that its cubin is made of, with all checks on; --seeds N runs the cases in
    N orders of warps, and a failure names the one that replays it. A SPEC that ends in .ptx is a PTX file: its kernels
    are listed with what the emulator does not handle of them. --coverage does so for the SPECs, or for all shipped ones
    on every arch there is, which compiles them all; anything that is not handled is an error.
    """
    files = [source for source in specs if source.endswith(_PTX_SUFFIX)]
    if files and len(files) != len(specs):
        raise SpecError(f"emulate takes specs or PTX files, not both: {files[0]} is a file, name it alone")
    if (files or coverage) and (seed is not None or only is not None or seeds != 1):
        raise SpecError("--seeds, --seed and --only choose what runs, and nothing does: leave them out")
    if files:
        if archs:
            raise SpecError(f"--arch {','.join(archs)}: a PTX file has the arch that it has: leave it out")
        _emulate_files(files, quiet, as_json)
    elif coverage:
        _cover(specs, archs, quiet, as_json)
    elif specs:
        _emulate_specs(specs, archs, seeds, seed, only, quiet, as_json)
    else:
        raise SpecError("emulate needs a SPEC, a PTX file or --coverage")


# ---- running


def _emulate_specs(
    specs: Sequence[str],
    archs: Sequence[str],
    seeds: int,
    seed: int | None,
    only: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from rich.console import Console

    from dsagen.check.emulate import run_seed

    progress = None if as_json or quiet else Console(stderr=True)
    drawn = secrets.randbelow(2**31) if seed is None else seed
    places = [
        (spec, arch)
        for spec in specs
        for arch in dict.fromkeys(cell.arch for cell in select([spec], archs)[0].matrix.cells)
    ]
    require_cases(places, "quick", only)
    runs: list[SeedRun] = []
    for spec, arch in places:
        for number in range(seeds):
            found = run_seed(spec, arch, number, drawn, only=only, measure=number == 0, console=progress)
            runs.append(found)
            if not (as_json or quiet):
                echo_lines(_run_lines(found))
    if as_json:
        echo_json({"runs": [found.to_json() for found in runs]})
    failed = [found for found in runs if not found.report.passed]
    if failed:
        lines = [f"{found.report.summary()}, emulator seed {found.seed}\n  {_failures(found)}" for found in failed]
        raise CheckFailed("\n".join(lines))
    idle = [found for found in runs if not found.report.conformant]
    if idle:
        raise CheckFailed(f"{idle[0].report.summary()}: nothing ran, so nothing is shown")


def _run_lines(found: SeedRun) -> list[str]:
    lines = [f"{found.report.summary()}, emulator seed {found.seed}"]
    for kernel in found.kernels:
        lines.append(f"  {kernel.symbol}: {kernel.launches} launches")
        lines += [f"    {line}" for line in kernel.counters.lines()]
    return lines


def _failures(found: SeedRun) -> str:
    listed = [f"{result.name}: {result.problem}" for result in found.report.failures]
    return "\n  ".join([*listed, f"Replay: {found.replay}"])


# ---- coverage


def _emulate_files(files: Sequence[str], quiet: bool, as_json: bool) -> None:
    from dsagen.emulator import coverage
    from dsagen.emulator.attributes import attributes
    from dsagen.emulator.ptx import parse

    kernels: list[dict[str, Any]] = []
    missing: dict[str, dict[str, int]] = {}
    for file in files:
        text = _read(Path(file))
        missing[file] = coverage(text)
        for name, kernel in parse(text).kernels.items():
            found = attributes(text, name)
            kernels.append(
                {
                    "file": file,
                    "kernel": name,
                    "instructions": len(kernel.instructions),
                    "argument_bytes": found.param_bytes,
                    "static_shared_bytes": found.static_shared_bytes,
                    "most_threads": found.max_threads,
                }
            )
    if as_json:
        echo_json({"kernels": kernels, "missing": missing})
    elif not quiet:
        echo_lines(
            f"{row['kernel']}: {row['instructions']} instructions, {row['argument_bytes']} B of arguments, "
            f"{row['static_shared_bytes']} B of static shared memory, at most {row['most_threads']} threads"
            for row in kernels
        )
    _require_handled({file: opcodes for file, opcodes in missing.items() if opcodes})


def _read(path: Path) -> str:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SpecError(f"{path}: the PTX cannot be read ({reason})") from None
    if ".entry" not in text:
        raise SpecError(f"{path}: no kernel in it: expected PTX with an .entry, as `nvcc -ptx` writes it")
    return text


def _cover(specs: Sequence[str], archs: Sequence[str], quiet: bool, as_json: bool) -> None:
    from dsagen.build import Store, build_units, make_progress
    from dsagen.emulator import coverage
    from dsagen.render import render
    from dsagen.runtime.emulated import code_of

    plans: dict[str, KernelPlan] = {}
    for selection in select(specs, archs) if specs else _everything(archs):
        plans.update({plan.slug: plan for plan in selection.matrix.plans()})
    progress = make_progress(as_json or quiet)
    if not (as_json or quiet):
        archs_named = ", ".join(dict.fromkeys(plan.variant.arch for plan in plans.values()))
        click.echo(
            f"{quantity(len(plans), 'kernel')} of {archs_named}: those that the store lacks are compiled first",
            err=True,
        )
    results = build_units([render(plan) for plan in plans.values()], Store.open(), progress=progress)
    missing: dict[str, dict[str, int]] = {}
    kernels: dict[str, int] = {}
    for result in results:
        entry = result.entry
        kernels[entry.arch] = kernels.get(entry.arch, 0) + 1
        for opcode, count in coverage(code_of(entry).ptx).items():
            of_arch = missing.setdefault(entry.arch, {})
            of_arch[opcode] = of_arch.get(opcode, 0) + count
    if as_json:
        echo_json({"archs": {a: {"kernels": n, "missing": missing.get(a, {})} for a, n in kernels.items()}})
    elif not quiet:
        rows = [
            [arch, f"{n} kernels", f"{len(missing.get(arch, {}))} opcodes not handled"] for arch, n in kernels.items()
        ]
        echo_lines(aligned(rows))
    _require_handled(missing)


def _everything(archs: Sequence[str]) -> list[Selection]:
    """All shipped specs on every arch there is, or on the given ones."""
    from dsagen.arch import ARCHS, arch
    from dsagen.matrix import expand
    from dsagen.spec import load_spec, shipped_specs

    chosen = [arch(name).name for text in archs for name in text.split(",")] or list(ARCHS)
    selections = []
    for name in shipped_specs():
        spec = load_spec(name).replace(archs=chosen)
        selections.append(Selection(spec, expand(spec)))
    return selections


def _require_handled(missing: Mapping[str, Mapping[str, int]]) -> None:
    if missing:
        lines = [
            f"{where}: the emulator does not handle {', '.join(f'{opcode} ({n}x)' for opcode, n in opcodes.items())}"
            for where, opcodes in missing.items()
        ]
        raise EmulatorError("\n".join(lines))
