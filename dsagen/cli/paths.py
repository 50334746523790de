"""Options that name a file or a folder."""

from __future__ import annotations

from typing import Any

import click


class NamedPath(click.Path):
    """As click.Path, without the empty path: what a variable that is not set leaves behind, not the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error for an empty one."""
        if value == "":
            self.fail("'' names neither a file nor a folder: name one, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)
