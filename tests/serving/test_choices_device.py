"""Choices of sparse decode on a device: splits that combine themselves, captured and replayed, and tuning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dsagen
from dsagen.check.run import device_problem
from dsagen.cli import main
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.choice_table import read_table
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

pytestmark = pytest.mark.gpu

SPEC = load_spec("v32_h16")
HEADS, TOPK, PAGES, PAGE = 16, 2048, 64, 64


@pytest.fixture(scope="module", autouse=True)
def needs_device() -> None:
    problem = device_problem(SPEC)
    if problem:
        pytest.skip(problem)


def load(monkeypatch: pytest.MonkeyPatch, launches: int) -> Kernels:
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", str(launches))
    kernels = dsagen.load(SPEC)
    kernels.prepare()
    return kernels


def inputs(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 1, HEADS, 576, generator=generator).bfloat16()
    cache = torch.randint(0, 56, (PAGES, PAGE, 1, 656), generator=generator, dtype=torch.uint8)
    cache[..., 512:528].view(torch.float32).fill_(0.1)
    cache[..., 528:].view(torch.bfloat16).fill_(0.5)
    ids = torch.randint(-1, PAGES * PAGE, (batch, 1, TOPK), generator=generator, dtype=torch.int32)
    return tuple(tensor.cuda() for tensor in (q, cache, ids))


@pytest.mark.parametrize(("batch", "splits"), [(1, 8), (4, 4), (16, 8), (64, 2)])
def test_one_launch_gives_the_bits_of_two_again_and_again(
    batch: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, one = load(monkeypatch, 2), load(monkeypatch, 1)
    plan = one.plan_sparse_decode(batch, 1, TOPK, num_splits=splits)
    other = two.plan_sparse_decode(batch, 1, TOPK, num_splits=splits)
    assert (plan.launches, other.launches) == (1, 2)
    tensors = inputs(batch, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = one.sparse_decode(*tensors, plan=plan)
    for seed in range(5):
        for buffer, value in zip(tensors, inputs(batch, seed), strict=True):
            buffer.copy_(value)
        wanted = two.sparse_decode(*tensors, plan=other)
        for _ in range(100):
            out.fill_(7)
            graph.replay()
            assert out.equal(wanted[0]) and lse.equal(wanted[1])
    assert plan.workspace is None


def test_a_second_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = load(monkeypatch, 1)
    plan, tensors = kernels.plan_sparse_decode(1, 1, TOPK, num_splits=8), inputs(1, 0)
    kernels.sparse_decode(*tensors, plan=plan)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(GuardError, match="T-10"):  # type: ignore[no-untyped-call]
        kernels.sparse_decode(*tensors, plan=plan)


def test_what_is_tuned_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    assert main(["tune", "v32_h16", "--shapes", "1,16", "--time-limit", "120", "-o", str(path)]) == 0
    rows = read_table(path)
    assert [row.tokens for row in rows] == [(1, 1), (9, 16)]
    for name in ("DSAGEN_SPARSE_DECODE_BODY", "DSAGEN_SPARSE_DECODE_LAUNCHES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", str(path))
    kernels = dsagen.load(SPEC)
    kernels.prepare()
    kernels.freeze()
    for row in rows:
        plan = kernels.plan_sparse_decode(row.tokens[1], 1, TOPK)
        launches = row.launches if row.num_splits > 1 else 1
        assert (plan.main_slug, plan.num_splits, plan.launches) == (row.kernel, row.num_splits, launches)
        print(row.describe())
