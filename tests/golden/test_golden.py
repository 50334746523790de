"""Golden texts and the README's generated tables are what the code says now."""

from __future__ import annotations

import pytest
from golden import FOLDER, golden_texts
from readme import README, updated_readme

UPDATE = "run `pytest tests/golden --update-golden`, and read the difference before you commit it"


@pytest.fixture(scope="module", autouse=True)
def update(request: pytest.FixtureRequest) -> None:
    """With --update-golden, rewrite everything before the comparisons run."""
    if request.config.getoption("--update-golden"):
        wanted = golden_texts()
        for path in FOLDER.glob("*.txt"):
            if path.name not in wanted:
                path.unlink()
        for name, text in wanted.items():
            (FOLDER / name).write_text(text)
        README.write_text(updated_readme(README.read_text()))


@pytest.mark.parametrize("name", sorted(golden_texts()))
def test_golden_text(name: str) -> None:
    path = FOLDER / name
    assert path.is_file(), UPDATE
    assert path.read_text() == golden_texts()[name], UPDATE


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.txt")} == set(golden_texts()), UPDATE


def test_the_readme_is_current() -> None:
    assert README.read_text() == updated_readme(README.read_text()), UPDATE
