"""`dsagen.load(spec, device="emulator")`: the ops, plans, guards and errors of a device, on CPU tensors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsagen
from dsagen.build import Store
from dsagen.check.run import run_check
from dsagen.check.topk_cases import topk_cases
from dsagen.cli import main
from dsagen.errors import DeviceError, EmulatorError, EmulatorLimitError, FrozenError, GuardError, StoreError
from dsagen.evidence import Rung, read_rows, rung
from dsagen.families.sparse_decode.reference import sparse_decode_reference
from dsagen.families.topk.reference import topk_reference
from dsagen.kv_format import kv_format
from dsagen.matrix import expand
from dsagen.render import render
from dsagen.runtime import api
from dsagen.runtime.api import Kernels
from dsagen.runtime.emulated import EmulatedCode, EmulatorOptions, read_ptx
from dsagen.spec import load_spec

pytestmark = pytest.mark.compile

BF16 = load_spec("v32_h16").replace(kv="bf16", name="emulated_bf16")
PAGES, PAGE, BATCH, TOPK = 3, 32, 2, 96


def load(spec: Any = BF16, **options: Any) -> Kernels:
    return dsagen.load(spec, device="emulator", emulator=EmulatorOptions(**options))


def call() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(BATCH, 1, 16, 576, generator=generator).bfloat16()
    k_cache = torch.randn(PAGES, PAGE, 1, 576, generator=generator).bfloat16()
    indices = torch.randint(-5, PAGES * PAGE + 5, (BATCH, 1, TOPK), generator=generator, dtype=torch.int32)
    return {"q": q, "k_cache": k_cache, "indices": indices}


@pytest.mark.parametrize("num_splits", [1, 2])
def test_sparse_decode(num_splits: int) -> None:
    kernels = load(seed=4)
    kernels.prepare()
    kernels.freeze()
    tensors = call()
    plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=num_splits)
    assert plan.device == kernels.device == torch.device("cpu")
    out, lse = kernels.sparse_decode(**tensors, plan=plan)
    want = sparse_decode_reference(
        tensors["q"], kv_format("bf16"), {"k_cache": tensors["k_cache"]}, tensors["indices"], sm_scale=BF16.sm_scale
    )
    assert torch.allclose(out.double().view(BATCH, 16, 512), want.out.double(), atol=2e-2)
    assert torch.allclose(lse.double()[:, :, 0], want.lse.double(), atol=1e-4)
    again = kernels.sparse_decode(**tensors)[0]
    assert torch.allclose(again.float(), out.float(), atol=2e-2)


def test_splits_that_combine_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch of clusters a call, and the bits of two launches."""
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", "hopper")
    found = {}
    for launches in (1, 2):
        monkeypatch.setenv("DSAGEN_SPARSE_DECODE_LAUNCHES", str(launches))
        kernels = load(seed=5)
        plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=2)
        assert plan.launches == launches
        tensors = call()
        found[launches] = [kernels.sparse_decode(**tensors, plan=plan) for _ in range(3 - launches)]
    for out, lse in found[1]:
        assert torch.equal(out, found[2][0][0]) and torch.equal(lse, found[2][0][1])


def test_topk() -> None:
    kernels = dsagen.load("v32_topk_h128", device="emulator")
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(3, dtype=torch.int32)
    found = kernels.topk(scores, k=7, counts=counts, determinism="order")
    assert torch.equal(found.long(), topk_reference(scores, 7)[0]) and counts.tolist() == [7, 7, 7]


def test_plans_are_those_of_the_arch_that_the_emulator_stands_for() -> None:
    spec = BF16.replace(archs=["sm_80", "sm_90a"])
    text = dsagen.load(spec, device="emulator").explain(batch=2, topk=96)
    assert "on device 0 (emulator with the SM count of an NVIDIA H200, sm_80, 132 SMs)" in text
    assert "-sm_80-" in text
    assert "sm_90a, 132 SMs" in dsagen.load(spec, device="emulator", archs=["sm_90a"]).explain(batch=2, topk=96)
    for name in (0, "cpu", "emulator", torch.device("cpu")):
        assert load().plan_sparse_decode(1, 1, 64, device=name).device == torch.device("cpu")
    with pytest.raises(DeviceError, match="device 'cuda:0': expected 'emulator', for which these kernels were loaded"):
        load().explain(batch=1, device="cuda:0")


def strided(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values in rows with a gap behind them."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + gap, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda t: strided(t, 1)}, r"\[SD-13\] q"),
        ({"q": lambda t: t.float()}, r"\[T-04\] q: dtype float32"),
        ({"q": lambda t: t.to("meta")}, r"\[T-03\] q: on meta, expected the CPU, since these kernels were loaded with"),
        ({"indices": lambda t: t.to("meta")}, r"\[T-03\] indices: on meta, q is on cpu"),
        ({"k_cache": lambda t: t[..., :500]}, r"\[T-06\] k_cache"),
        ({"out": lambda t: t}, r"\[T-08\] out: its memory overlaps that of q"),
    ],
)
def test_guards_are_those_of_a_device(change: dict[str, Any], message: str) -> None:
    tensors = call()
    tensors["out"] = tensors["q"][..., :512]
    if "out" not in change:
        del tensors["out"]
    for name, function in change.items():
        tensors[name] = function(tensors[name])
    with pytest.raises(GuardError, match=message):
        load().sparse_decode(**tensors)


def test_strided_tensors_and_a_lent_workspace() -> None:
    kernels, tensors = load(), call()
    plain, _ = kernels.sparse_decode(**tensors, plan=kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=2))
    room = torch.empty(kernels.sparse_decode_workspace_bytes(BATCH, 1, TOPK, num_splits=2) + 256, dtype=torch.uint8)
    lent = room[-room.data_ptr() % 256 :]
    plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=2, workspace=lent)
    spread = {**tensors, "q": strided(tensors["q"], 8), "indices": strided(tensors["indices"], 3)}
    assert torch.equal(kernels.sparse_decode(**spread, plan=plan)[0], plain)


def test_what_is_needed_after_freeze_is_an_error() -> None:
    kernels = load()
    kernels.freeze()
    with pytest.raises(FrozenError, match="needed but was not loaded on device 0"):
        kernels.sparse_decode(**call())


def test_a_launch_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSAGEN_EMULATOR_MOST_CTAS", "1")
    with pytest.raises(EmulatorLimitError, match=r"\[T-18\] grid: dsa_sparse_decode_main\w+ would run 2 CTAs"):
        load().sparse_decode(**call())


def test_without_a_compile_and_without_an_entry_the_store_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DSAGEN_NO_JIT", "1")
    with pytest.raises(StoreError, match="is not in the kernel store"):
        load()


# ---- the memory of a call


def spoilt(monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str) -> None:
    """From here on kernels come with every match of a pattern in their PTX replaced."""

    def read(plans: Any) -> dict[str, EmulatedCode]:
        codes = read_ptx(plans)
        assert any(re.search(pattern, code.ptx) for code in codes.values())
        return {slug: replace(code, ptx=re.sub(pattern, replacement, code.ptx)) for slug, code in codes.items()}

    monkeypatch.setattr(api, "read_ptx", read)


def test_a_kernel_that_leaves_its_operands_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row ends where the tensor's memory goes on: the bytes are there, but no operand's."""
    scores = torch.randn(2, 600, generator=torch.Generator().manual_seed(1))[:, :500]
    dsagen.load("v32_topk_h128", device="emulator").topk(scores, k=3)
    out = torch.full((2, 4), -7, dtype=torch.int32)
    spoilt(monkeypatch, r"(st\.global\.u32\s+\[%rd\d+)\]", r"\1+4]")
    with pytest.raises(
        EmulatorError, match=r"write of 4 bytes at global address \w+: \d+ bytes past the end of buffer out"
    ):
        dsagen.load("v32_topk_h128", device="emulator").topk(scores, k=3, out=out[:, :3])


def test_a_kernel_that_writes_what_is_const_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, r"ld\.global(\.nc)?\.u32\s+(%r\d+), (\[[^\]]+\]);", r"st.global.u32 \3, \2;")
    with pytest.raises(EmulatorError, match=r"into the read-only buffer (lengths|scores|indices)"):
        dsagen.load("v32_topk_h128", device="emulator").topk(
            torch.zeros(1, 64), k=3, lengths=torch.ones(1, dtype=torch.int32)
        )


def test_a_combine_that_does_not_wait_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, r"griddepcontrol\.wait;", "")
    kernels = load()
    plan = kernels.plan_sparse_decode(BATCH, 1, TOPK, num_splits=2)
    with pytest.raises(EmulatorError, match=r"buffer \w+ and \w+, which the grid before writes, ahead of"):
        kernels.sparse_decode(**call(), plan=plan)


# ---- what a check proves


def test_a_check_is_evidence_of_the_emulated_rung(
    tmp_path: Path, no_evidence: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(case for case in topk_cases("quick") if ".graph." in case.name or ".width." in case.name)
    monkeypatch.setattr("dsagen.check.run.topk_cases", lambda *_: few)
    file = tmp_path / "rows.jsonl"
    spec = load_spec("v32_topk_h128")
    report = run_check(spec, device="emulator", record_file=file, seed=1, emulator=EmulatorOptions(races=False))
    assert report.conformant and report.place == "emulator as sm_90a"
    units = [render(plan) for plan in expand(spec).plans()]
    rows = read_rows(file)
    assert {(row.device, row.arch, row.failed, row.tier) for row in rows} == {("emulator", "sm_90a", 0, "quick")}
    assert rows[0].driver.startswith("vm-") and rows[0].not_run == report.count("not_run") > 0
    # Kernels that no case has launched stay as they are.
    statuses = [rung(unit, rows, Store.open().lookup(unit)) for unit in units]
    assert [str(s) for s in statuses if s.rung is Rung.EMULATED] == ["emulated"] * len(rows)
    assert {s.rung for s in statuses} == {Rung.EMULATED, Rung.COMPILED}


# ---- the command line


def test_emulate_runs_cases_in_several_orders_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["emulate", "v32_topk_h128", "--only", "topk.width.?", "--seeds", "2", "--json", "--seed", "3"])
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert code == 0
    assert (first["report"]["counts"], second["emulator_seed"]) == ({"passed": 3, "failed": 0, "not_run": 0}, 1)
    assert sum(kernel["launches"] for kernel in first["kernels"]) == 3 and second["kernels"] == []
    assert all(kernel["counters"]["instructions"]["alu"] > 0 for kernel in first["kernels"])


def test_emulate_names_the_order_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, r"st\.global\.u32", "st.global.v9.u32")
    code = main(["emulate", "v32_topk_h128", "--only", "topk.width.3", "--seed", "3"])
    assert code == 4
    text = capsys.readouterr().err
    assert "topk.width.3: EmulatorError: dsa_topk" in text and "st.global.v9.u32" in text
    assert "Replay: DSAGEN_EMULATOR_SEED=0 dsagen check v32_topk_h128 --device emulator --arch sm_90a" in text


def test_coverage_of_a_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "--coverage", "v32_topk_h128"]) == 0
    kernels = len(expand(load_spec("v32_topk_h128")).plans())
    assert capsys.readouterr().out == f"sm_90a  {kernels} kernels  0 opcodes not handled\n"
    assert main(["emulate", "--coverage", "v32_topk_h128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"archs": {"sm_90a": {"kernels": kernels, "missing": {}}}}
