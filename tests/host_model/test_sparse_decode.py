"""The bodies of sparse decode, run on the CPU against an fp64 reference: indices, layouts, masks, splits, barriers."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from host import COMPILER
from sparse_case import Case, Extra, check, heads_per_block, launch, make_inputs, shape

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

INF = float("inf")
LONG_TAIL = (200, 0, 1, 77)

CASES = (
    # Head counts, with and without several groups: N a multiple of 8 below and above a warp's share.
    Case(heads=1, topk=130),
    Case(heads=8, topk=200),
    Case(heads=16, topk=1),
    Case(heads=16, topk=63),
    Case(heads=17, topk=65),
    Case(heads=24, topk=130, batch=1),
    Case(heads=40, topk=65, batch=1),
    Case(heads=40, group=24, topk=130, batch=1),
    Case(heads=64, topk=65, batch=1),
    Case(heads=64, group=16, topk=65, batch=1),
    # Page sizes that are and are not powers of two, pages with padding between them.
    Case(page_size=1, topk=63),
    Case(page_size=2, page_padding=1),
    Case(page_size=61, page_padding=3, topk=130),
    Case(page_size=64, page_padding=64),
    # Ids that are not there, columns past the length, rows without any token.
    Case(invalid=0.3, topk=200),
    Case(invalid=0.97, topk=130),
    Case(invalid=1.0),
    # Blocks of 16 rows without a valid one: in a live stage, a whole stage, whole tiles, the first and the last.
    Case(dead=((0, 16), (48, 80), (128, 192)), topk=200),
    Case(dead=((16, 48),), topk=65, invalid=0.3),
    Case(dead=((0, 64),), topk=200, ramp=120.0),
    Case(dead=((0, 128),), topk=200, splits=2),
    Case(dead=((32, 64), (96, 200)), topk=200, base=-200.0),
    Case(dead=((16, 32), (64, 128)), topk=330, ramp=200.0, heads=24, batch=1),
    Case(batch=4, topk=200, lengths=LONG_TAIL, invalid=0.1),
    Case(batch=4, topk=130, lengths=(-5, 64, 128, 2**31 - 1)),
    Case(batch=2, s_q=2, topk=65, lengths=(65, 3)),
    Case(batch=2, s_q=2, topk=65, lengths=(0, 65, 1, 64), invalid=0.2, base2=True),
    # Splits: even, uneven, some of them empty.
    Case(splits=2, topk=65),
    Case(splits=2, topk=200, s_q=2, batch=1, invalid=0.2),
    Case(splits=3, topk=200, heads=17, batch=1),
    Case(splits=3, batch=4, topk=200, lengths=LONG_TAIL, sinks=(0.0, INF, -INF, 3.5), base2=True),
    Case(splits=2, topk=130, invalid=1.0, sinks=(1.0,)),
    Case(splits=36, topk=2240, heads=8, batch=1),
    Case(splits=5, topk=130, s_q=2, batch=1),
    Case(splits=2, topk=130, lengths=(64, 65), group=8, page_size=61),
    # Sinks.
    Case(sinks=(0.0, INF, -INF, 2.0, -30.0, 100.0), invalid=0.2),
    Case(sinks=(INF, 1.0), lengths=(0, 65)),
    Case(sinks=(-INF, INF, 0.0), lengths=(0, 65), invalid=0.1),
    # Strides with gaps everywhere.
    Case(strided=True, s_q=2, lengths=(65, 30)),
    Case(strided=True, splits=2, heads=17, topk=130, page_padding=1, batch=1),
    # Logits that outgrow the softmax reference tile after tile, in few and in all heads, within and across splits.
    Case(ramp=100.0, topk=200),
    Case(ramp=300.0, topk=200, invalid=0.3, heads=24, batch=1),
    Case(ramp=100.0, topk=200, splits=2, sinks=(10.0,)),
    Case(base=-300.0, topk=130, invalid=0.4),
    Case(q_scale=40.0, topk=200),
    Case(q_scale=2.0**-118),
    Case(q_scale=2.0**-60, topk=65),
    # Magnitudes far from one, and heads without meaning (padding of a caller), which must not disturb the others.
    Case(row_scale=2.0**-70, topk=130),
    Case(row_scale=2.0**40, q_scale=2.0**-40, topk=130, splits=2),
    Case(poisoned_heads=(3, 4, 15), topk=200, ramp=80.0),
    Case(poisoned_columns=(47,), topk=200, ramp=300.0),
    Case(poisoned_columns=(3, 70, 199), topk=200, ramp=100.0, splits=2),
    Case(poisoned_heads=(0, 9), heads=24, topk=130, splits=2, batch=1),
)  # fmt: skip

# The same call in other shapes of the kernel. Where nothing else is said: what the arch gets for so many heads.
SHAPES = (
    Case(arch="sm_80"),
    Case(arch="sm_80", heads=32),
    Case(arch="sm_80", heads=64),
    Case(arch="sm_86"),
    Case(arch="sm_86", heads=40),
    Case(arch="sm_89", heads=24),
    Case(arch="sm_100a", heads=64),
    Case(arch="sm_103a", heads=16),
    Case(arch="sm_120a", heads=8),
    Case(arch="sm_120a", heads=40),
    Case(heads=8),
    Case(heads=32),
    Case(heads=56),
    # The shortest ring, as many producers as stages, one that does not divide them, one.
    Case(tile=shape(64, 3, producers=3)),
    Case(tile=shape(64, 3, producers=3, bulk=True)),
    Case(tile=shape(32, 2, bulk=True)),
    Case(tile=shape(64, 5, bulk=True), heads=24),
    Case(tile=shape(64, 5, producers=3, bulk=True)),
    Case(tile=shape(64, 4, producers=1)),
    Case(tile=shape(96, 4, score_warps=6, bulk=True), heads=8),
    Case(arch="sm_80", tile=shape(32, 3, producers=3, probability_buffers=1), heads=24),
    # One buffer of probabilities; more of them than tiles of a split.
    Case(tile=shape(64, 4, probability_buffers=1, bulk=True)),
    Case(tile=shape(32, 4, probability_buffers=1), heads=40),
    Case(tile=shape(32, 4, probability_buffers=3, bulk=True)),
    # Two blocks of tokens in a score warp, heads dealt to several of them evenly or not, or more warps than head tiles.
    Case(tile=shape(64, 4, warp_blocks=2, bulk=True)),
    Case(tile=shape(64, 4, warp_blocks=2), heads=24),
    Case(tile=shape(32, 4, warp_blocks=2), heads=8),
    Case(tile=shape(32, 3, warp_blocks=2, score_warps=3, bulk=True), heads=64),
    Case(tile=shape(32, 3), heads=8),
    Case(tile=shape(64, 4, score_warps=8, groups_together=2, bulk=True), heads=24),
    # Other deals of the dims.
    Case(tile=shape(32, 4, value_warps=4), heads=24),
    Case(tile=shape(64, 4, value_warps=16, bulk=True)),
    # Registers that move from producers to scores, and from scores to values.
    Case(tile=shape(64, 4, producers=4, bulk=True, registers=(128, 232, 24))),
    Case(tile=shape(32, 4, producers=1, registers=(176, 136, 24)), heads=40),
    Case(fmt="bf16", heads=8),
    Case(fmt="bf16", heads=24),
    Case(fmt="bf16", heads=64),
    Case(fmt="bf16", arch="sm_80"),
    Case(fmt="bf16", arch="sm_86", heads=8),
    Case(fmt="bf16", arch="sm_100a", heads=64),
    Case(fmt="bf16", tile=shape(32, 2, producers=2, warp_blocks=2, probability_buffers=1), heads=24),
    Case(fmt="bf16", tile=shape(64, 3, producers=3, bulk=True)),
    Case(fmt="v32_pow2"),
)


SHAPES_CALL = {"topk": 470, "splits": 2, "invalid": 0.15, "sinks": (0.5,), "batch": 1}


def label(case: Case) -> str:
    """What distinguishes a case."""
    default = Case()
    values = {f.name: getattr(case, f.name) for f in fields(Case)}
    values["tile"] = "/".join(f"{name}={value}" for name, value in case.tile)
    parts = [f"{name}={value}" for name, value in values.items() if value and value != getattr(default, name)]
    return " ".join(parts).replace("'", "") or "default"


@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.parametrize("fmt", ["v32", "bf16"])
def test_results(case: Case, fmt: str) -> None:
    check(Case(**{**vars(case), "fmt": fmt}))


# Every other encoding and placement, alone and as a second cache beside the same or its partner.
ENCODINGS = (
    Case(fmt="v32_nope"),
    Case(fmt="v4", page_size=61, page_padding=3),
    Case(fmt="v4", arch="sm_80"),
    Case(fmt="v4", heads=64),
    Case(fmt="v41_interleaved"),
    Case(fmt="v41_page_split", page_size=5, page_padding=1),
    Case(fmt="v41_page_split", heads=64),
    Case(fmt="v41_page_split", arch="sm_86", heads=24),
    Case(fmt="v41_fp4_interleaved", heads=24),
    Case(fmt="v41_fp4_page_split", page_size=2),
    Case(fmt="v41_fp4_page_split", heads=64),
    Case(fmt="v41_fp4_interleaved", arch="sm_80"),
    Case(fmt="fp16"),
    Case(fmt="fp16_d512", arch="sm_80", heads=8),
    Case(fmt="bf16_d512", heads=24),
    Case(fmt="bf16_split", page_size=5),
    Case(fmt="bf16_split", arch="sm_80"),
    Case(fmt="v32", extra=Extra("v32", 130, 5)),
    Case(fmt="v4", extra=Extra("v4", 200, 2, 3)),
    Case(fmt="v41_interleaved", extra=Extra("v41_fp4_interleaved", 200, 69)),
    Case(fmt="v41_page_split", extra=Extra("v41_fp4_page_split", 130, 5, 1), heads=64),
    Case(fmt="v41_page_split", extra=Extra("v41_fp4_page_split", 130, 5, 1), arch="sm_80", heads=8),
)


@pytest.mark.parametrize("case", ENCODINGS, ids=label)
@pytest.mark.parametrize(
    "call",
    [
        {"invalid": 0.2, "sinks": (0.5, INF, -INF), "dead": ((16, 32), (64, 128))},
        {"splits": 3, "ramp": 90.0, "strided": True},
    ],
    ids=["whole", "splits"],
)
def test_encodings(case: Case, call: dict[str, object]) -> None:
    check(Case(**{**vars(case), "topk": 200, "batch": 1, **call}))


@pytest.mark.parametrize(
    ("lengths", "extra_lengths", "invalid"),
    [
        ((200, 0, 64), (0, 130, 1), 0.1),
        ((0, 0, 0), (130, 0, 65), 0.0),
        ((5, 0, 200), (0, 0, 0), 0.0),
        ((200, 9, 70), (130, 64, 3), 1.0),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_either_cache_may_be_empty(
    lengths: tuple[int, ...], extra_lengths: tuple[int, ...], invalid: float, splits: int
) -> None:
    extra = Extra("v41_fp4_interleaved", 130, 5, lengths=extra_lengths, invalid=0.3)
    case = Case(fmt="v41_interleaved", extra=extra, batch=3, topk=200, lengths=lengths, invalid=invalid, splits=splits)
    check(replace(case, sinks=(1.0, -2.0)))


@pytest.mark.parametrize("case", SHAPES, ids=label)
@pytest.mark.parametrize("ramp", [0.0, 90.0])
def test_shapes(case: Case, ramp: float) -> None:
    # Split 0 has two tiles or more in each shape and all kinds of dead blocks; the last rows are rings apart.
    dead = ((16, 32), (64, 96), (128, 208), (336, 344))
    check(Case(**{**vars(case), **SHAPES_CALL, "dead": dead, "ramp": ramp}))


@pytest.mark.parametrize("splits", [1, 2])
def test_ramp_takes_the_slow_path(splits: int) -> None:
    case = Case(topk=200, splits=splits)
    level, rising = check(case), check(Case(topk=200, splits=splits, ramp=120.0))
    # The first tile raises the reference in any case; with a ramp later ones do too. Each time costs barriers.
    assert rising.counts.barriers > level.counts.barriers


def test_results_do_not_depend_on_the_schedule() -> None:
    case = Case(heads=24, topk=200, batch=1, ramp=60.0, invalid=0.1)
    inputs = make_inputs(case)
    first = launch(case, inputs)
    for seed in range(2, 5):
        again = launch(Case(**{**vars(case), "seed": seed}), inputs)
        assert np.array_equal(first.out, again.out)
        assert np.array_equal(first.lse, again.lse)


def test_results_do_not_depend_on_the_groups_of_heads() -> None:
    case = Case(heads=16, topk=130, batch=1)
    assert heads_per_block(case) == 16
    inputs = make_inputs(case)
    whole, halves = launch(case, inputs), launch(Case(**{**vars(case), "group": 8}), inputs)
    assert np.abs(whole.lse - halves.lse).max() < 1e-5
