"""Attention of 64 heads by three warpgroups: right in several orders, and its fences and waits needed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import warpgroup_attention

from dsagen.errors import EmulatorError

pytestmark = pytest.mark.compile
INPUTS = warpgroup_attention.inputs_of(2, 256)


@pytest.mark.parametrize(("seed", "schedule"), [(0, "turns"), (1, "random"), (2, "priorities")])
def test_it_is_held_to_numpy(seed: int, schedule: str) -> None:
    found = warpgroup_attention.run(INPUTS, seed=seed, schedule=schedule)
    want = warpgroup_attention.expected(INPUTS)
    assert np.abs(found - want).max() <= 2.0**-8 * np.abs(want).max()


# What is taken out of its PTX, how many there are of it, and what is said then.
MUTANTS = {
    "the fences of keys and queries": (r"fence\.proxy\.async\.shared::cta;", 2, "without fence.proxy.async"),
    "the wait for free tiles": (r"@!p bra WAIT;", None, "race: |not written before"),
    "the waits for products": (r"wgmma\.wait_group\.sync\.aligned 0;", None, "wgmma"),
    "the initialisation's order": (r"bar\.sync\s+0;", None, "mbarrier|race: "),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_missing_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, count, said = MUTANTS[name]
    text, found = re.subn(pattern, "", warpgroup_attention.text())
    assert found and (count is None or found == count)
    monkeypatch.setattr(warpgroup_attention, "text", lambda: text)
    with pytest.raises(EmulatorError, match=said):
        warpgroup_attention.run(INPUTS)
