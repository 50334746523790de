"""What the machine's C++ must not have."""

from __future__ import annotations

import re

from dsagen.emulator.library import SOURCES, load_library

# g++ 12 makes the temporaries of the list for one side of the conditional only: the other one is given what lay there.
CHOSEN_AND_BRACED = re.compile(r"\?[^;{}?]*:[^;{}]*\)\s*=\s*\{")


def test_no_braced_list_is_assigned_to_a_conditional() -> None:
    assert CHOSEN_AND_BRACED.search("(here ? a[n] : b->c) = {now(w), 1};")
    found = {path.name for path in SOURCES.iterdir() if CHOSEN_AND_BRACED.search(path.read_text(encoding="utf-8"))}
    assert not found, "assign through a reference to what the conditional chooses"


def test_halves_are_not_compared_by_a_library() -> None:
    """Which g++ does where a half that was made a float is compared with itself: a fourth of the time of a kernel."""
    library = load_library()
    data = (library.folder / f"{library.name}.so").read_bytes()
    assert b"vm_run" in data
    assert not re.findall(rb"__(?:eq|ne|lt|le|gt|ge|unord)hf2", data)
