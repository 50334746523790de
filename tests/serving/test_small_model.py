"""A small model generates the tokens that it does in torch: on the emulator, and on a device by replays of a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_model import SPEC, Generation, PagedGeneration, PlainAttention, Weights, generate_plain

import dsagen
from dsagen.check.run import device_problem
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import load_spec

NEW = 8
# Weights and prompts with which no token is nearly another, and no selected key nearly one that is not: a key more or
# less moves logits by about 1, which says nothing of kernels. Prompts have no token twice, whose keys would be equal.
SEED = 2649
# How near the scores of keys may come to each other, as a part of the largest: codes of e4m3 that are rounded the other
# way, as they may be by sums of fp32 in another order, have moved scores past others 2^-7.1 of it away.
NARROWEST = 2.0**-6.5
# What sums in another order do to weights, at most: 128 dims in fp32.
_NOISE = 2.0**-20


def prompts() -> list[list[int]]:
    """Of fewer than k and more than k tokens, on one page and two."""
    return [torch.randperm(64, generator=torch.Generator().manual_seed(n))[:n].tolist() for n in (20, 4, 13)]


def moved(found: Generation, want: Generation) -> float:
    """The most that a logit differs by."""
    return max(float((a - b).abs().max()) for a, b in zip(found.logits, want.logits, strict=True))


def require_same(found: Generation, want: Generation) -> None:
    """The same tokens, by logits that have moved by less than could have made one another's."""
    assert found.tokens == want.tokens
    assert 2 * moved(found, want) < want.closest


@pytest.fixture
def emulated(shared_store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    return dsagen.load(SPEC, device="emulator", emulator=EmulatorOptions(races=False))


@pytest.mark.compile
def test_tokens_are_those_of_the_model_in_torch(emulated) -> None:
    weights = Weights(SEED, emulated.device)
    want = generate_plain(weights, prompts(), NEW, emulated.spec.sm_scale)
    paged = PagedGeneration(emulated, weights, prompts(), NEW)
    require_same(paged.run(paged.step), want)
    # Were pages those of another request, others would come.
    paged.reset()
    paged.attention.plan.row_tables.copy_(paged.attention.plan.row_tables.roll(1))
    assert paged.run(paged.step).tokens != want.tokens


def test_attention_and_its_selection_decide_the_tokens() -> None:
    """The comparison would be empty if they did not."""
    weights, scale = Weights(SEED, torch.device("cpu")), load_spec(SPEC).sm_scale
    want = generate_plain(weights, prompts(), NEW, scale)

    class Silent(PlainAttention):
        def __call__(self, *given):
            return super().__call__(*given) * 0

    class Recent(PlainAttention):
        def select(self, layer, *indexer):
            return torch.arange(len(self.rows[layer]))[-16:]

    for other in (Silent, Recent):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("small_model.PlainAttention", other)
            assert generate_plain(weights, prompts(), NEW, scale).tokens != want.tokens


def test_roundings_decide_neither_tokens_nor_selections() -> None:
    """Else a device that sums in another order might give others, and be right."""
    cpu, scale = torch.device("cpu"), load_spec(SPEC).sm_scale
    want = generate_plain(Weights(SEED, cpu), prompts(), NEW, scale)
    assert want.narrowest > NARROWEST
    for seed in range(3):
        weights, draw = Weights(SEED, cpu), torch.Generator().manual_seed(seed)
        for name, value in vars(weights).items():
            setattr(weights, name, value * (1 + _NOISE * torch.randn(value.shape, generator=draw)))
        require_same(generate_plain(weights, prompts(), NEW, scale), want)


@pytest.mark.gpu
def test_a_captured_step_generates_the_same_tokens() -> None:
    problem = device_problem(load_spec(SPEC))
    if problem:
        pytest.skip(problem)
    kernels = dsagen.load(SPEC)
    kernels.prepare()
    kernels.freeze()
    weights = Weights(SEED, kernels.device)
    want = generate_plain(weights, prompts(), NEW, kernels.spec.sm_scale)
    paged = PagedGeneration(kernels, weights, prompts(), NEW)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        require_same(paged.run(paged.step), want)
    with torch.cuda.graph(graph, stream=stream):
        paged.step()
    for _ in range(2):
        paged.reset()
        require_same(paged.run(graph.replay), want)
