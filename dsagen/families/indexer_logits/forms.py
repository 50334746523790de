"""Kernels of the logits and the forms of keys that each is for."""

from __future__ import annotations

from collections.abc import Mapping

# The kernels for keys in pages, the same with scores of candidate blocks, for keys in one piece, and for those of
# candidate blocks alone.
PAGED, BLOCKS, RAGGED, CANDIDATES = "main", "blocks", "ragged", "candidates"
# For keys in pages, with counts of scores by the first digit of their keys: of decode steps, whose top-k takes these
# counts in the place of its first pass.
COUNTED = "counted"
# Kernels by the form that keys have, and forms by kernel.
ROLES: Mapping[str, str] = {"paged": PAGED, "blocks": BLOCKS, "ragged": RAGGED, "candidates": CANDIDATES}
FORMS: Mapping[str, str] = {**{role: form for form, role in ROLES.items()}, COUNTED: "paged"}


def parts_of(kernel: str) -> tuple[tuple[str, bool], ...]:
    """The parts of headers that a kernel has: `counts` of its scores, and what a body does for candidate blocks."""
    return ("counts", kernel == COUNTED), ("epilogue", kernel == BLOCKS)
