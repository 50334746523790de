"""The command group, and the one place where an error becomes a line and an exit code.

Command modules import what they run inside the command, so that `dsagen --help` and a warm build stay fast.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import click

from dsagen.cli import (
    INTERRUPTED,
    READER_LEFT,
    building,
    completing,
    doctor,
    emulating,
    explaining,
    listing,
    measuring,
    packing,
    proving,
    storing,
    tuning,
)
from dsagen.errors import DsagenError, SpecError
from dsagen.log import configure_logging

EXIT_CODES = """Exit codes: 0 success, 2 bad input, 3 failed build, 4 failed check, 5 no usable device,
130 interrupted, 143 and 129 ended by SIGTERM and SIGHUP, 141 the reader of the output has left, 1 anything else."""


class _ReaderLeft(Exception):
    """Nobody reads standard output any more. No OSError, of which click makes an exit code of its own."""


@contextlib.contextmanager
def _watching_the_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _ReaderLeft from None


class _Commands(click.Group):
    """A group that names the nearest command when there is none of that name."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _watching_the_reader():  # --help and --version print here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _watching_the_reader():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            ctx.fail(f"no command {args[0]!r}{hint}; commands are {', '.join(sorted(self.commands))}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"dsagen {installed_version()}")
        ctx.exit()


def installed_version() -> str:
    """The version of the installed package, or "not installed" in a bare checkout."""
    try:
        return metadata.version("dsagen")
    except metadata.PackageNotFoundError:
        return "not installed"


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-v", "--verbose", count=True, help="Log what is compiled and why (-vv: look-ups and commands too).")
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Version.")
def cli(verbose: int) -> None:
    """Compile exactly the CUDA kernels that a sparse-attention deployment needs.

    A SPEC is a YAML file, or the name of a shipped one such as v32_h16. Building needs neither a GPU nor torch;
    `check`, `bench` and `tune` need a device;
    `emulate`, and `check --device emulator`, run the same kernels on the CPU.
    """
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() does the same; only whether there is one matters
    except OSError as error:
        raise SpecError(f"the current folder cannot be used ({error.strerror}): change to one that exists") from None
    configure_logging(verbose)


for _command in (
    building.build,
    building.render,
    listing.list_variants,
    listing.schema,
    explaining.explain,
    proving.check,
    emulating.emulate,
    measuring.bench,
    tuning.tune,
    packing.bundle,
    packing.verify,
    storing.clear,
    building.compile_commands,
    completing.completion,
    doctor.doctor,
):
    cli.add_command(_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (of the process by default); the exit code."""
    try:
        return _run(arguments)
    except (_ReaderLeft, BrokenPipeError):
        # The reader has what it wanted, as `head -1` has: what SIGPIPE would have said, without a word.
        _forget_output()
        return READER_LEFT
    except OSError as error:
        # A full disk below standard output, say, or a place that no command expected to fail.
        where = f": {error.filename}" if error.filename else _stream_at_fault(error)
        _forget_output()
        with contextlib.suppress(OSError):
            click.echo(f"error: {error.strerror or error}{where}", err=True)
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="dsagen", standalone_mode=False)
    except click.ClickException as error:
        usage = f"{error.ctx.get_usage()}\n" if isinstance(error, click.UsageError) and error.ctx else ""
        return _complain(f"{usage}error: {error.format_message()}", error.exit_code)
    except click.Abort:
        return _complain("error: interrupted", INTERRUPTED)
    except DsagenError as error:
        return _complain(f"error: {error}", error.exit_code)
    return code if isinstance(code, int) else 0


def _complain(text: str, exit_code: int) -> int:
    """Print on standard error; the exit code stands where even that cannot be written."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)
    return exit_code


def _stream_at_fault(error: OSError) -> str:
    """Words for standard output where an error without a file's name comes from printing, else none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    printing = {"click.utils", "rich.console"} & {str(frame.f_globals.get("__name__")) for frame in frames}
    return ": standard output" if printing else ""


def _forget_output() -> None:
    """Let what standard output still holds go nowhere: the interpreter would complain once more while it flushes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
