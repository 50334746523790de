"""Which body of the logits a kernel has, and why: what is built, what the spec takes, and what a knob asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dsagen import knobs
from dsagen.arch import WGMMA, Arch
from dsagen.families.indexer_logits import hopper, hopper_ragged
from dsagen.index_format import index_format

if TYPE_CHECKING:
    from dsagen.spec import IndexSpec

# For every form of keys, format and arch; its sums are fp32.
PORTABLE = "mma_sync"
# Formats of keys that the hopper body is built for, by the form that keys have.
_HOPPER_KEYS: Mapping[str, tuple[str, ...]] = {
    "paged": hopper.KEYS,
    "blocks": hopper.KEYS,
    "ragged": hopper_ragged.KEYS,
}


class BodyChoice(NamedTuple):
    """A body and the reason for it, in words."""

    body: str
    why: str


def hopper_takes(keys: str, form: str, arch: Arch) -> bool:
    """Whether the hopper body is built for keys of that format in that form, on an arch."""
    return arch.mma_class == WGMMA and keys in _HOPPER_KEYS.get(form, ())


def choose_body(index: IndexSpec, form: str, arch: Arch) -> BodyChoice:
    """The body of the kernel for an indexer's keys in a form: DSAGEN_INDEXER_LOGITS_BODY's where that is built, else
    `hopper` where the spec takes its sums, else `mma_sync`.
    """
    if not hopper_takes(index.keys, form, arch):
        return BodyChoice(PORTABLE, f"the only one for {index.keys} keys in form {form} on {arch.name}")
    asked = knobs.INDEXER_LOGITS_BODY.get()
    if asked is not None:
        return BodyChoice(asked, f"{knobs.INDEXER_LOGITS_BODY.name} asks for it")
    if index_format(index.keys).is_block_scaled:
        return BodyChoice(hopper.BODY, f"its sums of {index.keys} keys are fp32")
    if index.accumulation == "fast":
        return BodyChoice(hopper.BODY, "index.accumulation: fast takes its sums")
    why = f"index.accumulation: fp32 takes no sums of e4m3 products; fast would take {hopper.BODY}"
    return BodyChoice(PORTABLE, why)
