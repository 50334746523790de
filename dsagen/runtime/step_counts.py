"""Decode steps whose scores are counted where they are made: launches of the indexer's counting kernel and of the
selection that begins with what it has counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from dsagen.runtime.driver import Driver
from dsagen.runtime.indexer import FORM as LOGITS_FORM
from dsagen.runtime.launch import OpLaunches
from dsagen.runtime.topk import FORM as TOPK_FORM

# A call has the tensors of one of indexer_logits; where counts go is memory of a top-k's plan.
FORM = replace(LOGITS_FORM, held=frozenset({"histograms"}))


class CountedLaunches(NamedTuple):
    """Of one plan of top-k, to whose histograms `scoring` adds, and from which `selecting` takes what is there.

    Each launch of `scoring` has to be followed by one of `selecting`, over the same rows and lengths, which leaves
    zeros.
    """

    scoring: OpLaunches
    selecting: OpLaunches


def counted_launches(driver: Driver, debug_sync: bool, failed: Callable[[], None]) -> CountedLaunches:
    """Launches of both; `failed` as of OpLaunches."""
    return CountedLaunches(*(OpLaunches(driver, form, debug_sync, failed=failed) for form in (FORM, TOPK_FORM)))
