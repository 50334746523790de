"""All cases, and records of what a device gave for them."""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calibration import lanes, products, values
from calibration.case import Case

GOLDEN = Path(__file__).parent / "golden"


@cache
def cases() -> tuple[Case, ...]:
    """Every micro-kernel. Boxes of tensor maps, mapa and multicast are to follow."""
    groups = (
        products.layouts, products.sums, products.base_offsets, values.conversions, values.approximations,
        values.open_questions, lanes.shuffles, lanes.reductions, lanes.mbarriers,
    )  # fmt: skip
    return tuple(case for group in groups for case in group())


def packed(case: Case, result: np.ndarray) -> dict[str, Any]:
    """A result as JSON has it."""
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(result).tobytes(), 9)).decode()
    return {"key": case.key, "dtype": case.dtype, "shape": list(case.shape), "data": data}


def unpacked(row: dict[str, Any]) -> np.ndarray:
    """The result that a row holds."""
    data = zlib.decompress(base64.b64decode(row["data"]))
    return np.frombuffer(data, row["dtype"]).reshape(row["shape"])


def write(path: Path, device: str, driver: str, toolkit: str, rows: dict[str, dict[str, Any]]) -> None:
    """A record: who gave it, and a row for each case."""
    head = {"device": device, "driver": driver, "toolkit": toolkit}
    path.write_text(json.dumps({**head, "cases": rows}, indent=1, sort_keys=True) + "\n")


def golden_records() -> dict[str, dict[str, Any]]:
    """Records of devices, by the file's name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}
