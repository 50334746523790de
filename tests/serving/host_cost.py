"""What calls cost the host where there is no device: python tests/serving/host_cost.py [SPEC...] [--rounds N].

The launcher in C runs on a driver library that only records launches, on CPU tensors, so the figures are of dsagen's
own work and torch's, on this machine. They are compared with each other, and are no figures of a device: those are
`dsagen bench --host`'s. Time is the process's own, calls take turns; on a busy machine the least of many rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from fake_driver import GOOD, fake_cubins
from native_driver import NativeFakeDriver

from dsagen.bench.host_cost import Call, host_calls, issue_costs_us
from dsagen.cli.table import aligned
from dsagen.compat import flash_mla
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

REGISTERS = {"topk": 60, "kv_cache": 40, "index_cache": 40}
CALLS_PER_ROUND = 100


def torchs_own() -> Iterator[tuple[str, Call]]:
    """What torch takes of a call: its op without a body, and the outputs."""
    library: Any = torch.library.Library("dsagen_host_cost", "DEF")
    arguments = "Tensor q, Tensor k, Tensor ids, str kernels"
    options = ", ".join(f"Tensor? option_{index}=None" for index in range(4))
    library.define(f"empty({arguments}, {options}) -> (Tensor, Tensor)")
    library.define(f"empty_out({arguments}, Tensor(a!) out, Tensor(b!) lse, {options}) -> ()")
    out, lse = torch.zeros(1, 1, 16, 512).bfloat16(), torch.zeros(1, 1, 16).transpose(1, 2)
    library.impl("empty", lambda *_: (out, lse), "CPU")
    library.impl("empty_out", lambda *_: None, "CPU")
    ops, given = torch.ops.dsagen_host_cost, (out, out, out, "v32_h16-0123456789ab#0")
    yield "torch: an op without a body", lambda: (library, ops.empty(*given))
    yield "torch: an out variant without a body", lambda: ops.empty_out(*given, out, lse)
    yield "torch: both outputs", lambda: (torch.empty_like(out), torch.empty_like(lse))


def drop_in(kernels: Kernels) -> Iterator[tuple[str, Call]]:
    """A call of flash_mla's, for the kernels that it can name."""
    spec = kernels.spec
    if "sparse_decode" not in spec.ops or spec.kv_format.format_id != "v32":
        return
    flash_mla.use(kernels)
    q = torch.zeros(1, 1, spec.heads, spec.dims.d_qk).bfloat16()
    cache, ids = torch.zeros(4, 64, 1, 656, dtype=torch.uint8), torch.zeros(1, 1, 512, dtype=torch.int32)
    meta, splits = flash_mla.get_mla_metadata()
    yield (
        "drop-in for flash_mla",
        lambda: flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, meta, splits, None, False, True, ids),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=["v32_h16"])
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    for name in options.specs:
        spec = load_spec(name)
        registers = min((REGISTERS.get(op, 128) for op in spec.ops), default=128)
        driver = NativeFakeDriver(attributes_of=replace(GOOD, registers=registers))
        kernels = Kernels(spec, open_driver=lambda driver=driver: driver, read=fake_cubins)
        kernels.prepare()
        ways = [(f"{op}: {call}", way) for op, call, _, way in host_calls(kernels)]
        ways += [*drop_in(kernels), *torchs_own()]

        def forget_records(driver: NativeFakeDriver = driver) -> None:
            driver.cuda.set("stub_count", 0)

        found = issue_costs_us(
            [way for _, way in ways], forget_records, CALLS_PER_ROUND, options.rounds, clock=time.process_time
        )
        rows = [[call, f"{median:.2f}", f"{least:.2f}"] for (call, _), (median, least) in zip(ways, found, strict=True)]
        print("\n".join(aligned(rows, [spec.name, "median us", "least us"])))


if __name__ == "__main__":
    main()
