"""`dsagen tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import json_option, quiet_option, select, specs_argument
from dsagen.cli.table import echo_json, echo_lines
from dsagen.errors import CheckFailed, SpecError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.tune.run import Tuning

# Seconds. Reckoned are some 150 choices of the nine default shapes of a width, a fraction of a second each.
DEFAULT_LIMIT_S = 600


@click.command()
@specs_argument()
@click.option(
    "--shapes",
    metavar="SHAPE,...",
    help="BATCH[xS_Q][:TOPK[+EXTRA_TOPK]], such as 1,16:2048,4x2:512.  [default: 1 to 256, as wide as in bench]",
)
@click.option(
    "--time-limit",
    type=click.IntRange(min=1),
    default=DEFAULT_LIMIT_S,
    show_default=True,
    help="Seconds for all of it; what was measured by then is written.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the inputs.")
@click.option(
    "-o",
    "--output",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="The table to write to.  [default: the device's in the kernel store, which `dsagen.load` reads]",
)
@quiet_option
@json_option
def tune(
    specs: tuple[str, ...],
    shapes: str | None,
    time_limit: int,
    seed: int,
    output: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure which kernel of sparse decode is fastest for the SPECs' shapes on this machine's GPU, with how many
    splits and launches, and write that into a choice table.

    Times are GPU time by graph replay with cold inputs. Outputs of every choice are compared with a reference; one that
    is wrong is never taken, and makes the exit code 4. Rows of the table for other kernels and columns stay.
    """
    from dsagen.bench.choices import DeviceMeasurer
    from dsagen.bench.run import Pools
    from dsagen.tune.run import Deadline
    from dsagen.tune.run import tune as measure
    from dsagen.tune.shapes import tuned_cases
    from dsagen.tune.table import default_file, require_writable, write_rows

    wanted = []
    for selection in select(specs, ()):
        selection.matrix.require_complete()
        wanted.append((selection.spec, tuned_cases(selection.spec, shapes)))
    if output is not None:
        require_writable(output)
    deadline, pools, found = Deadline(time_limit), Pools(False), []
    for spec, cases in wanted:
        measurer = DeviceMeasurer(spec, pools, seed)
        file = output or default_file(measurer.device)
        require_writable(file)
        tuned = measure(measurer, cases, deadline, (lambda _: None) if quiet else _say)
        # At once, so that what comes later cannot lose it.
        write_rows(file, tuned.rows)
        found.append((spec.name, file, tuned))
        if deadline.passed:
            break
    _show(found, quiet, as_json)
    wrong = [text for _, _, tuned in found for text in tuned.wrong]
    if wrong:
        choices = quantity(len(wrong), "choice")
        raise CheckFailed("\n  ".join((f"{choices} gave wrong outputs, none of them taken:", *wrong)))
    if not any(tuned.rows for _, _, tuned in found):
        raise SpecError(f"--time-limit {time_limit}: no shape was measured in that time: raise it")
    missed = [spec.name for spec, _ in wanted[len(found) :]]
    if missed and not quiet:
        _say(f"no time for {', '.join(missed)}: raise --time-limit {time_limit}")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _show(found: list[tuple[str, Path, Tuning]], quiet: bool, as_json: bool) -> None:
    if as_json:
        echo_json(
            {
                "tables": [
                    {
                        "spec": name,
                        "file": str(file),
                        "rows": [row.to_json() for row in tuned.rows],
                        "wrong": tuned.wrong,
                        "not_measured": [case.to_json() for case in tuned.left],
                    }
                    for name, file, tuned in found
                ]
            }
        )
    elif not quiet:
        for name, file, tuned in found:
            left = f"; no time for {len(tuned.left)} more" if tuned.left else ""
            echo_lines([f"{name}: {quantity(len(tuned.rows), 'row')} in {file}{left}"])
