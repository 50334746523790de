"""Numbers of things, as messages and reports name them."""

from __future__ import annotations


def quantity(count: int, noun: str, plural: str = "") -> str:
    """`1 row`, `2 rows`; `plural` where it is not the noun with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
