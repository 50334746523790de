"""`dsagen clear`."""

from __future__ import annotations

import click

from dsagen.cli.selection import json_option, quiet_option
from dsagen.cli.table import echo_json, echo_lines
from dsagen.errors import SpecError
from dsagen.quantity import quantity


@click.command()
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every kernel.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, print what would be.")
@quiet_option
@json_option
def clear(patterns: tuple[str, ...], everything: bool, dry_run: bool, quiet: bool, as_json: bool) -> None:
    """Remove kernels from the kernel store whose slug matches a PATTERN, such as 'topk-*-sm_90a-*'.

    Broken ones and what failed builds left go too. Read-only layers of DSAGEN_CACHE_DIR and evidence stay.
    """
    from dsagen.build import Store

    if everything == bool(patterns):
        raise SpecError("clear needs one of the two: a PATTERN of slugs (`dsagen list` shows them), or --all")
    store, chosen = Store.open(), patterns or ("*",)
    if dry_run:
        names = list(dict.fromkeys(path.name for pattern in chosen for path in store.matching(pattern)))
    else:
        names = [name for pattern in chosen for name in store.clear(pattern)]
    if as_json:
        echo_json({"removed": [] if dry_run else names, "matching": names})
    elif not quiet:
        done = "would be removed" if dry_run else "removed"
        echo_lines([*names, f"{quantity(len(names), 'kernel')} {done}"])
