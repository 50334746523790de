"""The decode loop of an engine on the emulator, held to the same loop over the references in torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import PAGE, Engine, run
from torch import Tensor

import dsagen
from dsagen.families.kv_cache.reference import write_reference
from dsagen.families.sparse_decode.reference import sparse_decode_reference
from dsagen.families.topk.reference import topk_reference, translate_reference
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions
from dsagen.spec import DeploymentSpec, load_spec

pytestmark = pytest.mark.compile

LAYERS, BATCH, MAX_PAGES, TOPK = 2, 3, 2, 70
# Requests of each step; the rows of the others do nothing.
LIVE = (3, 1, 0, 2)


def spec() -> DeploymentSpec:
    return load_spec("v32_h16").replace(
        name="serving_h16", ops=["sparse_decode", "topk", "kv_cache"], scores="fp32", kv_write={"rows": "bf16"}
    )


class References:
    """The ops of loaded kernels by their references."""

    def __init__(self) -> None:
        self.spec, self.device = spec(), torch.device("cpu")
        self.record = self.spec.kv_format

    def plan_sparse_decode(self, *_: int) -> None:
        return None

    plan_topk = plan_sparse_decode

    def kv_write(self, rows: Tensor, cache: Tensor, slots: Tensor) -> None:
        write_reference(self.record, self._caches(cache), rows, slots, self._rule())

    def topk(self, scores: Tensor, *, k: int, lengths: Tensor, out: Tensor, counts: Tensor, **rest: Any) -> None:
        indices, found = topk_reference(scores, k, lengths=lengths)
        out.copy_(translate_reference(indices, page_table=rest["page_table"], page_size=rest["page_size"]))
        counts.copy_(found)

    def sparse_decode(self, q: Tensor, cache: Tensor, ids: Tensor, **rest: Any) -> None:
        want = sparse_decode_reference(
            q, self.record, self._caches(cache), ids, sm_scale=self.spec.sm_scale, topk_length=rest["topk_length"]
        )
        rest["out"].copy_(want.out.view(rest["out"].shape))
        rest["lse"].copy_(want.lse.view(q.shape[0], 1, -1).transpose(1, 2))

    def _caches(self, cache: Tensor) -> dict[str, Tensor]:
        return {self.record.cache_tensor().name: cache}

    def _rule(self) -> str:
        assert self.spec.kv_write is not None
        return str(self.spec.kv_write.rule)


@pytest.fixture
def launched() -> list[str]:
    return []


@pytest.fixture
def kernels(shared_store: Path, monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> dsagen.Kernels:
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))

    def observe(launch: EmulatedLaunch) -> None:
        launched.append(launch.symbol.split("_sm_90a")[0])

    return dsagen.load(spec(), device="emulator", emulator=EmulatorOptions(observe=observe))


def engine(kernels: Any) -> Engine:
    return Engine(kernels, LAYERS, BATCH, MAX_PAGES, TOPK)


def test_the_loop_gives_what_the_references_give(kernels: dsagen.Kernels, launched: list[str]) -> None:
    kernels.prepare()
    kernels.freeze()
    mine, theirs = engine(kernels), engine(References())
    found, expected = (run(each, len(LIVE), LIVE.__getitem__, each.step) for each in (mine, theirs))
    for live, got, want in zip(LIVE, found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert not got[live:].any(), "a row without a request did something"
        assert got[:live].any() or not live
    for layer, want in zip(mine.layers, theirs.layers, strict=True):
        assert layer.cache.equal(want.cache)
    a_step = ["dsa_kv_cache_write_warp_rows", "dsa_topk_main_row_resident", "dsa_sparse_decode_main_hopper"]
    per_layer = len(launched) // (LAYERS * len(LIVE))
    assert launched[:3] == a_step and per_layer in (3, 4)
    assert len(launched) == per_layer * LAYERS * len(LIVE)


def test_a_poisoned_workspace_changes_nothing(
    kernels: dsagen.Kernels, monkeypatch: pytest.MonkeyPatch, shared_store: Path
) -> None:
    monkeypatch.setenv("DSAGEN_POISON_WORKSPACE", "1")
    poisoned = dsagen.load(spec(), device="emulator")
    cache = torch.zeros(2, PAGE, 1, 656, dtype=torch.uint8)
    cache[..., 512:528].view(torch.float32).fill_(1.0)
    q, ids = torch.randn(2, 1, 16, 576).bfloat16(), torch.randint(-1, 2 * PAGE, (2, 1, TOPK), dtype=torch.int32)
    ids[1, :, 20:] = -1
    results = []
    for each in (kernels, poisoned):
        plan = each.plan_sparse_decode(2, 1, TOPK, num_splits=2)
        assert plan.workspace is not None
        # Without the knob zeros lie there, which would hide that they are read.
        plan.workspace.zero_()
        results.append(each.sparse_decode(q, cache, ids, plan=plan))
    for got, want in zip(*results, strict=True):
        assert got.equal(want)


def test_the_poison_is_nan(monkeypatch: pytest.MonkeyPatch, kernels: dsagen.Kernels) -> None:
    monkeypatch.setenv("DSAGEN_POISON_WORKSPACE", "1")
    poisoned = dsagen.load(spec(), device="emulator")
    plan = poisoned.plan_sparse_decode(1, 1, TOPK, num_splits=2)
    assert plan.workspace is not None
    plan.workspace.zero_()
    launches = SimpleNamespace(launch=lambda *_: None, hold_stream=lambda _: None)
    monkeypatch.setattr(plan, "_launches", launches)
    cache = torch.zeros(2, PAGE, 1, 656, dtype=torch.uint8)
    poisoned.sparse_decode(torch.zeros(1, 1, 16, 576).bfloat16(), cache, torch.zeros(1, 1, TOPK).int(), plan=plan)
    assert plan.workspace.view(torch.float32).isnan().all()
