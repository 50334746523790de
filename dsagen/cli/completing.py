"""`dsagen completion`, and what a shell is offered for specs, archs and files."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/dsagen.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a SHELL, for commands, options, specs and archs.

    For bash: eval "$(dsagen completion bash)", once or in ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = context.find_root()
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(f"# in {_WHERE[shell]}")
    click.echo(kind(root.command, {}, "dsagen", "_DSAGEN_COMPLETE").source())


def complete_specs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of shipped specs, and files."""
    from dsagen.spec import shipped_specs

    names = [CompletionItem(name) for name in shipped_specs() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


def complete_archs(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of archs; of a comma list the last one is completed."""
    from dsagen.arch import ARCHS

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in ARCHS if name.startswith(last)]


def complete_files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files."""
    return [CompletionItem(incomplete, type="file")]
