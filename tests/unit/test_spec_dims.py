"""Dims of a spec: unquantised rows of any width, and where kernels end."""

from __future__ import annotations

from typing import Any

import pytest

from dsagen.errors import SpecError
from dsagen.matrix import expand
from dsagen.spec import DeploymentSpec, load_spec


def spec_of(kv: str, d_qk: int, d_v: int) -> DeploymentSpec:
    changes: dict[str, Any] = {"kv": kv, "dims": {"d_qk": d_qk, "d_v": d_v}}
    return DeploymentSpec(model="custom", heads=16, archs=["sm_90a"], ops=["sparse_decode"], topk=64, **changes)


@pytest.mark.parametrize(
    ("kv", "dims", "format_id"),
    [
        ("bf16", (192, 128), "bf16_d192_v128"),
        ("fp16", (512, 256), "fp16_d512_v256"),
        ("bf16", (576, 512), "bf16"),
        ("bf16", (512, 512), "bf16_d512"),
        ("bf16_d192_v128", (192, 128), "bf16_d192_v128"),
    ],
)
def test_unquantised_rows_have_any_width(kv: str, dims: tuple[int, int], format_id: str) -> None:
    spec = spec_of(kv, *dims)
    assert (spec.kv.format_id, spec.dims.d_qk, spec.dims.d_v) == (format_id, *dims)
    assert load_spec(spec.to_mapping()) == spec
    record = spec.kv_format
    assert (record.d_qk, record.d_v, record.record_bytes) == (*dims, 2 * dims[0])


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ((100, 64), "bf16 rows of d_qk 100 and d_v 64: both must be multiples of 64"),
        ((128, 192), "d_v at most d_qk"),
        ((2048, 512), "d_qk at most 1024"),
    ],
)
def test_widths_that_no_row_has_are_named(dims: tuple[int, int], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        spec_of("bf16", *dims)


@pytest.mark.parametrize(("d_qk", "d_v"), [(192, 64), (640, 640), (640, 576)])
def test_widths_that_no_kernel_takes_are_refused_with_the_guard(d_qk: int, d_v: int) -> None:
    reasons = {cell.refusal for cell in expand(spec_of("bf16", d_qk, d_v)).refused}
    (reason,) = reasons
    assert f"[SD-18] rows of d_qk {d_qk} and d_v {d_v}: " in reason
    assert "128, 256, 384 or 512" in reason and "calls" not in reason
