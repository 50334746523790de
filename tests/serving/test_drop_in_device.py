"""The drop-in modules on a device: the sparse-decode cases of flash_mla's tests, and capture without a plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from drop_in import DropIn

import dsagen
from dsagen.check.cases import corner_cases, peer_cases, with_extra
from dsagen.check.probes import CaseRun
from dsagen.check.run import device_problem, run_case
from dsagen.compat import flash_mla, flash_mla_legacy
from dsagen.compat.decode import DEPLOYMENTS
from dsagen.spec import load_spec

pytestmark = pytest.mark.gpu

MODULES = {"newer": flash_mla, "older": flash_mla_legacy}


@pytest.fixture(autouse=True)
def needs_device() -> Iterator[None]:
    problem = device_problem(load_spec("v32_h64"))
    if problem:
        pytest.skip(problem)
    yield
    DEPLOYMENTS.forget()


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("generation", MODULES)
@pytest.mark.parametrize("cases", [peer_cases, corner_cases])
def test_peers_case_list(generation: str, heads: int, cases) -> None:
    """Nothing is given to use(), so deployments are derived. The older module takes the smallest batches."""
    drop_in = DropIn(MODULES[generation], load_spec(f"v32_h{heads}"))
    problems, count = [], 0
    for case in cases():
        if generation == "older" and case.batch > 4:
            continue
        result, _ = run_case(CaseRun(case, lambda _: drop_in, torch.device("cuda", 0), seed=11))
        count += 1
        if result.status != "passed":
            problems.append((case.name, result.status, result.problem))
    assert not problems, f"{len(problems)} of {count}: {problems[:3]}"
    assert count >= 16


@pytest.mark.parametrize(
    ("generation", "spec"),
    [("newer", "v4_h64"), ("newer", "v41_h64"), ("older", "v4_h64"), ("older", "v41_page_split_h64")],
)
def test_peers_cases_with_a_second_cache(generation: str, spec: str) -> None:
    drop_in = DropIn(MODULES[generation], load_spec(spec))
    problems = []
    for case in with_extra(case for case in (*peer_cases(), *corner_cases()) if case.batch <= 4):
        result, _ = run_case(CaseRun(case, lambda _: drop_in, torch.device("cuda", 0), seed=11))
        if result.status != "passed":
            problems.append((case.name, result.status, result.problem))
    assert not problems, f"{len(problems)}: {problems[:3]}"


def test_a_capture_needs_no_call_before_on_its_stream() -> None:
    """Engines warm up on one stream and capture on another."""
    q = torch.randn(4, 1, 64, 576, device="cuda").bfloat16()
    cache = torch.randint(0, 56, (64, 64, 1, 656), device="cuda", dtype=torch.uint8)
    cache[..., 512:528].view(torch.float32).fill_(0.1)
    cache[..., 528:].view(torch.bfloat16).fill_(0.5)
    ids = torch.randint(-1, 4096, (4, 1, 2048), device="cuda", dtype=torch.int32)

    def layers():
        meta, none = flash_mla.get_mla_metadata()
        results = []
        for scale in (0.05, 0.1, 0.2):
            results += flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, meta, none, scale, indices=ids)
        return results

    want = layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(2):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        for got, expected in zip(found, want, strict=True):
            assert got.equal(expected)


def test_given_kernels_are_used_and_may_be_frozen() -> None:
    kernels = dsagen.load("v32_h64")
    kernels.prepare()
    kernels.freeze()
    flash_mla.use(kernels)
    q = torch.zeros(1, 1, 64, 576, device="cuda").bfloat16()
    cache, ids = torch.zeros(2, 64, 1, 656, device="cuda").byte(), torch.zeros(1, 1, 64, device="cuda").int()
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], indices=ids)
    assert out.shape == (1, 1, 64, 512) and lse.shape == (1, 64, 1)
    assert len(kernels._plans._plans) == 1
