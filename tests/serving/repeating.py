"""What `repeat` of a plan answers, call by call: one script for a device and for a driver that records launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsagen.runtime.api import Kernels
from dsagen.runtime.sparse_decode import DecodeTensors


class Answers(NamedTuple):
    """What `repeat` answered to a call like none before, and to one that is known, without outputs and with them."""

    unknown: Any
    known: Any
    unknown_given: Any
    known_given: Any
    # Outputs of the first call, which was checked, and of the last one, whose memory held sevens before it.
    checked: tuple[Tensor, Tensor]
    given: tuple[Tensor, Tensor]


def answers_of(kernels: Kernels, q: Tensor, k_cache: Tensor, indices: Tensor) -> Answers:
    """Ask a new plan to repeat calls before and after calls like them were checked.

    A call that leaves its outputs out and one that brings them are two calls, of which each has to be checked first.
    """
    plan = kernels.plan_sparse_decode(*indices.shape)
    free = DecodeTensors(q, k_cache, indices)
    unknown = plan.repeat(*free, None)
    checked = kernels.sparse_decode(*free[:3], plan=plan)
    known = plan.repeat(*free, None)
    given = free._replace(out=torch.empty_like(checked[0]), lse=torch.empty_like(checked[1]))
    assert given.out is not None and given.lse is not None
    unknown_given = plan.repeat(*given, None)
    kernels.sparse_decode(*free[:3], plan=plan, out=given.out, lse=given.lse)
    given.out.fill_(7)
    given.lse.fill_(7)
    known_given = plan.repeat(*given, None)
    return Answers(unknown, known, unknown_given, known_given, checked, (given.out, given.lse))


def require_repeated(answers: Answers) -> None:
    """The answers of a launcher in C that reads the tensors itself."""
    assert (answers.unknown, answers.unknown_given, answers.known_given) == (False, False, True)
    assert type(answers.known) is tuple and len(answers.known) == 2
    for new, first in zip(answers.known, answers.checked, strict=True):
        assert (new.shape, new.dtype, new.stride(), new.device) == (
            first.shape,
            first.dtype,
            first.stride(),
            first.device,
        )
        assert new.data_ptr() != first.data_ptr()
