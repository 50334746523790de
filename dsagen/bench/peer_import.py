"""Where the libraries that we compare with come from: the environment, or the folder that a knob names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol

from dsagen import knobs
from dsagen.errors import SpecError


class Library(Protocol):
    """What is imported: a short name, what pip installs, and the module."""

    name: str
    requirement: str
    module: str


def import_peer(library: Library, submodule: str = "") -> ModuleType:
    """The peer's module or a submodule of it, from the environment or from DSAGEN_PEER_SITE.

    SpecError that says what to install where it cannot be imported, or where another copy comes first.
    """
    site = knobs.PEER_SITE.get()
    if site is not None and site not in sys.path:
        sys.path.append(site)
    try:
        module = importlib.import_module(library.module)
        found = importlib.import_module(f"{library.module}.{submodule}") if submodule else module
    # A library built for another torch fails in the dynamic loader, which torch reports as OSError or RuntimeError.
    except (ImportError, OSError, RuntimeError) as error:
        where = f"DSAGEN_PEER_SITE is {site}" if site is not None else "DSAGEN_PEER_SITE is not set"
        raise SpecError(
            f"peer {library.name}: cannot import {library.module} ({type(error).__name__}: {error}); {where}. "
            f"`pip install --target FOLDER {library.requirement}` and set DSAGEN_PEER_SITE=FOLDER, or leave it out"
        ) from None
    _check_origin(library, module, site)
    return found


def _check_origin(library: Library, module: ModuleType, site: str | None) -> None:
    """An installed copy must not stand in for the one that the knob names."""
    origin = getattr(module, "__file__", None)
    if site is None or origin is None or not (Path(site) / library.module).is_dir():
        return
    if not Path(origin).resolve().is_relative_to(Path(site).resolve()):
        raise SpecError(
            f"peer {library.name}: DSAGEN_PEER_SITE={site} has {library.module}, but {origin} comes first on the "
            "import path. Unset DSAGEN_PEER_SITE to measure that one, or uninstall it"
        )
