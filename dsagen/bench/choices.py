"""Measuring choices of sparse decode: a kernel with so many splits and launches, on the inputs of a benchmark case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsagen.bench.data import DecodeCase
from dsagen.bench.run import PEER_GATES, Pools, Prepared, decode_calls, in_natural_log, prepare_case, problem_of
from dsagen.bench.timing import graph_time_us
from dsagen.build import Store
from dsagen.check.compare import Gates, compare_decode
from dsagen.check.recording import driver_version
from dsagen.errors import CheckFailed, DeviceError, StoreError
from dsagen.families.sparse_decode.family import with_all_bodies
from dsagen.families.sparse_decode.op import DecodeShape
from dsagen.matrix import Matrix
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.runtime.api import Kernels
from dsagen.spec import DeploymentSpec


class DeviceMeasurer:
    """The main kernels of a spec in every body that takes its rows, on the current CUDA device.

    `pools` are shared by the measurers of a run. Raises DeviceError without a device that the spec declares.
    """

    def __init__(self, spec: DeploymentSpec, pools: Pools, seed: int = 0) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                f"no CUDA device, and torch {torch.__version__} sees none: choices are measured on a GPU that the spec "
                "declares; `dsagen explain` shows what is taken without a table"
            )
        self.spec, self._pools, self._seed = spec, pools, seed
        self._kernels = Kernels(spec, select=_all_bodies)
        self._kernels.prepare()
        self.plans: Sequence[KernelPlan]
        self.plans, facts = self._kernels.main_kernels()
        self.sm_count, self.device = facts.sm_count, facts.name
        self._prepared: Prepared | None = None
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    def columns(self, slug: str) -> Mapping[str, str]:
        """What a table's row says of a kernel and this machine beside its choice."""
        unit = render(next(plan for plan in self.plans if plan.slug == slug))
        entry = Store.open().lookup(unit)
        if entry is None:
            raise StoreError(f"{slug}: not in the store, so what compiled it cannot be recorded")
        toolchain, text = f"nvcc {entry.nvcc_version}", unit.evidence_hash
        return {"text": text, "device": self.device, "driver": driver_version(), "toolchain": toolchain}

    def begin(self, case: DecodeCase) -> None:
        """Draw the inputs of a case; what follows is measured on them."""
        self._first = None
        self._prepared = prepare_case(case, *self._pools.of(case, self._kernels.device), self._seed)

    def measure(self, slug: str, num_splits: int, launches: int) -> float:
        """Microseconds of a choice, GPU time by graph replay with cold inputs.

        Its outputs are compared with the fp64 reference, as far as a benchmark does, and in whole with those of the
        case's first choice; CheckFailed where they are wrong.
        """
        prepared = self._prepared
        assert prepared is not None, "a case has begun"
        case = prepared.case
        shape = DecodeShape(case.batch, case.s_q, case.heads, case.topk, case.extra_topk or 0)
        plan = self._kernels.plan_choice(shape, slug, num_splits, launches)
        calls = decode_calls(self._kernels, plan, prepared)
        call = in_natural_log(calls[0], self.spec)
        problem = problem_of(call, prepared, Gates().for_logits(prepared.expected.peak)) or self._difference(call)
        if problem:
            raise CheckFailed(f"{slug}, {num_splits} splits in {launches} launches: {case}: {problem}")
        # The graph's stream is another one.
        torch.cuda.synchronize()
        plan.rebind()
        return graph_time_us(calls).median_us

    def _difference(self, call: Any) -> str:
        """What differs from the first choice's outputs, which the first call keeps; empty when nothing does."""
        out, lse = (tensor.clone() for tensor in call())
        if self._first is None:
            self._first = out, lse
            return ""
        width = out.shape[-1]
        wanted, wanted_lse = self._first
        flat = [lse.transpose(1, 2).flatten(0, 1) for lse in (lse, wanted_lse)]
        rows = out.flatten(0, 1), flat[0], wanted.flatten(0, 1).double(), flat[1].double()
        found = compare_decode(*rows, math.gcd(width, 128), PEER_GATES).problem
        return f"beside the first choice: {found}" if found else ""


def _all_bodies(matrix: Matrix) -> Matrix:
    return Matrix(matrix.spec_name, with_all_bodies(matrix.cells))
