"""`dsagen bench`: what kernels take on a device, what calls cost the host, and pictures of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsagen.cli.comparing import bench_shapes
from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import describe_spec, json_option, quiet_option, select, specs_argument
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import CheckFailed, SpecError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.bench.axes import SweepAxes
    from dsagen.bench.figures import Figures
    from dsagen.spec import DeploymentSpec


@click.command()
@specs_argument()
@click.option("--peers", is_flag=True, help="Measure other libraries on the same inputs, in the same process.")
@click.option(
    "--op",
    type=click.Choice(["sparse_decode", "topk", "indexer_logits", "kv_cache", "index_cache", "decode_step", "contest"]),
    help="Measure this alone.  [default: all that the SPECs have]",
)
@click.option("--host", is_flag=True, help="Measure what a call costs the host, by op and launcher, and nothing else.")
@click.option("--batch", metavar="N,...", help="Batches of sparse decode, in place of the case list's.")
@click.option("--s-q", metavar="N,...", help="Query tokens of a request, likewise.")
@click.option("--topk", metavar="N,...", help="Columns of an index row, likewise.")
@click.option("--heads", metavar="N,...", help="Query heads, in place of the spec's.")
@click.option("--kv", metavar="FORMAT,...", help="KV formats, in place of the spec's.")
@click.option(
    "--shape-list",
    metavar="NAME|FILE",
    help="Measure sparse decode for a list of shapes, with a verdict on each: decode60, or a file of JSON lines.",
)
@click.option("--time-limit", type=click.IntRange(min=1), help="Seconds after which no other shape of a list is begun.")
@click.option("--plot", type=NamedPath(path_type=Path, file_okay=False), help="Folder for pictures and index.html.")
@click.option(
    "--recorded", is_flag=True, help="Measure nothing: show the last record of these kernels, for --plot or --json."
)
@click.option(
    "--record",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Evidence file to append to.  [default: one in the kernel store]",
)
@quiet_option
@json_option
def bench(
    specs: tuple[str, ...],
    peers: bool,
    op: str | None,
    host: bool,
    batch: str | None,
    s_q: str | None,
    topk: str | None,
    heads: str | None,
    kv: str | None,
    shape_list: str | None,
    time_limit: int | None,
    plot: Path | None,
    recorded: bool,
    record: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure the SPECs' kernels on this machine's device, beside the floor and the last record.

    What is timed is compared with a reference. Peers that are not installed are noted: DSAGEN_PEER_SITE names a
    folder to find them in.
    """
    from dsagen.bench.axes import SweepAxes, parse_values

    axes = SweepAxes(
        batch=parse_values("--batch", batch),
        s_q=parse_values("--s-q", s_q),
        topk=parse_values("--topk", topk),
        heads=parse_values("--heads", heads),
        kv=() if kv is None else tuple(kv.split(",")),
    )
    shapes = {"--batch": batch is not None, "--s-q": s_q is not None, "--topk": topk is not None}
    if shape_list is not None:
        others = {"--host": host, "--recorded": recorded, "--plot": plot is not None, "--op": op is not None}
        _require_alone("--shape-list", shapes | {"--heads": heads is not None, "--kv": kv is not None} | others)
        bench_shapes(
            specs,
            shape_list,
            peers=peers,
            time_limit=time_limit,
            record=record,
            progress=_progress(quiet),
            quiet=quiet,
            as_json=as_json,
        )
        return
    if time_limit is not None:
        raise SpecError("--time-limit: means nothing without --shape-list: leave it out")
    loaded = _specs(specs, axes)
    if host:
        others = shapes | {
            "--peers": peers,
            "--op": op is not None,
            "--record": record is not None,
            "--plot": plot is not None,
        }
        _require_alone("--host", others | {"--recorded": recorded})
        _bench_host(loaded, quiet, as_json)
    elif recorded:
        _require_alone("--recorded", shapes | {"--peers": peers, "--op": op is not None})
        _show_recorded(loaded, plot, record, as_json)
    else:
        if axes and op not in (None, "sparse_decode"):
            raise SpecError(f"--op {op}: a sweep is of sparse_decode: leave either out")
        _bench(loaded, axes, peers, op, plot, record, quiet, as_json)


def _specs(names: Sequence[str], axes: SweepAxes) -> list[DeploymentSpec]:
    from dsagen.matrix import expand

    loaded = []
    for selection in select(names, ()):
        selection.matrix.require_complete()
        if axes and "sparse_decode" not in selection.spec.ops:
            raise SpecError(f"{selection.spec.name}: a sweep is of sparse_decode, which its ops lack: leave it out")
        for spec in axes.specs(selection.spec):
            expand(spec).require_complete()
            loaded.append(spec)
    return loaded


def _bench(
    specs: Sequence[DeploymentSpec],
    axes: SweepAxes,
    peers: bool,
    op: str | None,
    plot: Path | None,
    record: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    from dsagen.bench.plots import require_drawable
    from dsagen.bench.recording import last_times_us, record_figures, slower_lines
    from dsagen.bench.sweep import current_device_name, run_sweep
    from dsagen.evidence import require_recordable

    device = current_device_name()
    require_recordable(record)
    if plot is not None:
        require_drawable(plot)
    records = last_times_us(device, record)
    wrong: list[str] = []
    figures = run_sweep(
        specs, with_peers=peers, records=records, progress=_progress(quiet), wrong=wrong.append, axes=axes, only=op
    )
    files: set[Path] = set()
    for spec in specs:
        own = [found for found in figures if found.spec == spec.name]
        files.update(record_figures(spec, own, record))
        if not (as_json or quiet):
            echo_lines(_figure_lines(spec, own))
    slower, plain = slower_lines(figures), [found.to_json() for found in figures]
    if as_json:
        echo_json({"figures": plain, "slower": slower})
    elif quiet:
        echo_lines(slower)
    else:
        echo_lines([*slower, f"recorded in {', '.join(sorted(map(str, files)))}"])
    _draw(plain, plot)
    if wrong:
        raise CheckFailed("\n  ".join((f"{quantity(len(wrong), 'case')} gave wrong outputs:", *wrong)))


def _show_recorded(specs: Sequence[DeploymentSpec], plot: Path | None, record: Path | None, as_json: bool) -> None:
    from dsagen.bench.recording import last_cases

    cases = last_cases(specs, record)
    if as_json:
        echo_json({"figures": cases})
    elif plot is None:
        raise SpecError("--recorded: nothing would be shown: add --plot FOLDER or --json")
    _draw(cases, plot)


def _draw(cases: Sequence[Mapping[str, Any]], folder: Path | None) -> None:
    if folder is not None:
        from dsagen.bench.plots import write_plots

        page, *pictures = write_plots(cases, folder)
        _say(f"{quantity(len(pictures), 'picture')}: {page}")


def _require_alone(option: str, others: Mapping[str, bool]) -> None:
    for name, given in others.items():
        if given:
            raise SpecError(f"{name}: means nothing beside {option}: leave either out")


def _bench_host(specs: Sequence[DeploymentSpec], quiet: bool, as_json: bool) -> None:
    from dsagen.bench.host_cost import goal_rows, measure_host_costs, table_rows
    from dsagen.bench.sweep import current_device_name

    device = current_device_name()
    costs = [cost for spec in specs for cost in measure_host_costs(spec, _progress(quiet))]
    if as_json:
        echo_json({"device": device, "host_costs": [cost.to_json() for cost in costs]})
        return
    header, rows = table_rows(costs)
    echo_lines([f"host cost of a call on {device}: median of rounds (best round)", *aligned(rows, header, indent=2)])
    header, rows = goal_rows(costs)
    if rows:
        echo_lines(["beside its goals:", *aligned(rows, header, indent=2)])


def _progress(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else _say


def _say(text: str) -> None:
    click.echo(text, err=True)


def _figure_lines(spec: DeploymentSpec, figures: Sequence[Figures]) -> list[str]:
    """A table for each op with a row for each case; what a peer could not do stands below it."""
    from dsagen.bench.figures import number

    lines: list[str] = []
    for op in dict.fromkeys(found.op for found in figures):
        own = [found for found in figures if found.op == op]
        labels = list(dict.fromkeys(peer.label for found in own for peer in found.peers))
        rows = []
        for found in own:
            by_label = {peer.label: peer.gpu_us for peer in found.peers}
            rows.append([*found.cells(), *(number(by_label.get(label), ".1f") for label in labels)])
        notes = dict.fromkeys(f"{peer.label}: {peer.note}" for found in own for peer in found.peers if peer.note)
        title = f"{spec.name}: {describe_spec(spec)}, {op} on {own[0].device}"
        lines += [title, *aligned(rows, [*own[0].header, *labels], indent=2), *(f"  {note}" for note in notes)]
        lines += [f"  missed: {found.title}: {text}" for found in own for text in found.missed]
    return lines
