"""Kernels of the logits and the forms of keys that each is for."""

from __future__ import annotations

from collections.abc import Mapping

# The kernels for keys in pages, the same with scores of candidate blocks, for keys in one piece, and for those of
# candidate blocks alone.
PAGED, BLOCKS, RAGGED, CANDIDATES = "main", "blocks", "ragged", "candidates"
# Kernels by the form that keys have, and forms by kernel.
ROLES: Mapping[str, str] = {"paged": PAGED, "blocks": BLOCKS, "ragged": RAGGED, "candidates": CANDIDATES}
FORMS: Mapping[str, str] = {role: form for form, role in ROLES.items()}
