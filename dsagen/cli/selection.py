"""From the SPEC and --arch arguments to matrices and rendered units, and how a matrix is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dsagen import knobs
from dsagen.cli.completing import complete_archs, complete_specs
from dsagen.cli.table import aligned
from dsagen.errors import KnobError, SpecError

if TYPE_CHECKING:
    from dsagen.family import Cell
    from dsagen.matrix import Matrix
    from dsagen.render import RenderedUnit
    from dsagen.spec import DeploymentSpec

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Selection:
    """One spec of the command line and its matrix for the archs that were asked for."""

    spec: DeploymentSpec
    matrix: Matrix


def specs_argument(required: bool = True) -> Callable[[Command], Command]:
    """The SPEC... argument."""
    return click.argument("specs", metavar="SPEC...", nargs=-1, required=required, shell_complete=complete_specs)


def arch_option(command: Command) -> Command:
    """The --arch option, repeatable, each value one arch or a comma list."""
    return click.option(
        "--arch",
        "archs",
        multiple=True,
        metavar="ARCH",
        shell_complete=complete_archs,
        help="Only this arch of those that the spec declares (repeatable, or a comma list). "
        "Default: DSAGEN_ARCH_LIST, else all of them.",
    )(command)


def quiet_option(command: Command) -> Command:
    """The --quiet flag."""
    return click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")(command)


def json_option(command: Command) -> Command:
    """The --json flag."""
    return click.option(
        "--json", "as_json", is_flag=True, callback=_alone_on_output, help="Print one JSON document and nothing else."
    )(command)


def _alone_on_output(_context: click.Context, _option: click.Parameter, as_json: bool) -> bool:
    if as_json and knobs.LOG_DEST.get() == "stdout":
        raise KnobError("DSAGEN_LOG_DEST='stdout': with --json only the document goes there: name a file or stderr")
    return as_json


def select(specs: Iterable[str], archs: Iterable[str]) -> list[Selection]:
    """Load the specs and expand their matrices.

    SpecError for a bad spec, an arch that a spec does not declare, and two specs of one name that differ.
    """
    from dsagen.matrix import expand
    from dsagen.spec import load_spec

    named = tuple(archs)
    words = tuple(word for text in named for word in text.split(","))
    if not all(word.strip() for word in words):
        raise SpecError(f"--arch {','.join(named)!r}: an element is empty; expected a list such as sm_90a,sm_100a")
    listed = () if words else knobs.ARCH_LIST.get() or ()
    wanted = words or listed or None
    selections: dict[str, Selection] = {}
    for source in specs:
        spec = load_spec(source)
        known = selections.get(spec.name)
        if known is not None and known.spec != spec:
            raise SpecError(f"two different specs are named {spec.name!r}: set `name` in one of them")
        try:
            selections[spec.name] = Selection(spec, expand(spec, wanted))
        except SpecError as error:
            if not listed:
                raise
            # The arch that it is about is nowhere on the command line.
            raise KnobError(f"{knobs.ARCH_LIST.name}={','.join(listed)}: {error}") from None
    return list(selections.values())


def render_units(selections: Iterable[Selection]) -> list[RenderedUnit]:
    """Every kernel of the selections once, rendered; SpecError when a spec declares what cannot be built."""
    from dsagen.render import render

    plans = {}
    for selection in selections:
        selection.matrix.require_complete()
        plans.update({plan.slug: plan for plan in selection.matrix.plans()})
    return [render(plan) for plan in plans.values()]


def matrix_lines(selections: Sequence[Selection], middle_column: Callable[[Cell], str] | None = None) -> list[str]:
    """The matrices as text, a block for each spec.

    The columns are op, role, arch, kept or refused, what `middle_column` says, the slug or the reason, and what decided
    on a body.
    """
    lines = []
    for selection in selections:
        lines.append(f"{selection.spec.name}: {describe_spec(selection.spec)}")
        rows = []
        for cell in selection.matrix.cells:
            middle = [middle_column(cell)] if middle_column else []
            state = "kept" if cell.kept else "refused"
            rows.append([cell.op, cell.role, cell.arch, state, *middle, cell_text(cell), cell.why and f"({cell.why})"])
        lines += aligned(rows, indent=2)
    return lines


def cell_text(cell: Cell) -> str:
    """A kept cell's slug, a refused one's reason."""
    return cell.variant.slug if cell.variant is not None and cell.kept else cell.refusal


def describe_spec(spec: DeploymentSpec) -> str:
    """A spec in one line."""
    extra = f" + {spec.extra_kv.format_id} (topk {spec.extra_kv.topk})" if spec.extra_kv is not None else ""
    mode = "" if spec.determinism == "off" else f", {spec.determinism.replace('_', '-')}"
    scores = f", {spec.scores} scores" if spec.scores is not None else ""
    index = spec.index
    indexer = "" if index is None else f", index of {index.heads} heads x {index.dim}, {index.keys} keys"
    indexer += "" if index is None or index.accumulation == "fp32" else f", {index.accumulation} accumulation"
    indexer += ", histogram" if index is not None and index.histogram else ""
    write = spec.kv_write
    rules = "" if write is None else " and ".join(filter(None, (write.rule, write.extra_rule)))
    writes = "" if write is None else f", {write.rows} rows by {rules}"
    keys = spec.index_write
    writes += "" if keys is None else f", {keys.rows} index keys by {keys.rule}"
    caches = f"KV {spec.kv.format_id} (topk {spec.topk}){extra}"
    kv_heads = f" of {spec.kv_heads} KV heads" if spec.kv_heads > 1 else ""
    return f"{spec.model}, {spec.heads} heads{kv_heads}, {caches}{mode}{indexer}{scores}{writes}"
