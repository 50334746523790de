"""All cases, and records of what a device gave for them."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from calibration import boxes, clusters, lanes, products, values, warp_products
from calibration.case import Case

GOLDEN = Path(__file__).parent / "golden"


@cache
def cases() -> tuple[Case, ...]:
    """Every micro-kernel."""
    groups = (
        products.layouts, products.sums, products.base_offsets, warp_products.sums, warp_products.matrices,
        values.conversions, values.approximations, values.open_questions, lanes.shuffles, lanes.reductions,
        lanes.mbarriers, clusters.global_copies, clusters.addresses, clusters.arrivals, clusters.stores,
        clusters.multicasts, boxes.ranks, boxes.swizzles, boxes.elements, boxes.reductions, boxes.parts,
        boxes.alignments, boxes.multicasts, boxes.unaligned,
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


def write(
    path: Path,
    about: Mapping[str, str],
    rows: Mapping[str, dict[str, Any]],
    failed: Mapping[str, str],
    maps: Mapping[str, dict[str, Any]],
) -> None:
    """A record: who gave it, a row for each case, errors of those that failed, and what was said of tensor maps."""
    keys = {case.name: case.key for case in cases()}
    errors = {name: {"key": keys[name], "error": why} for name, why in failed.items() if name in keys}
    # What is no case is about all of them.
    others = {name: why for name, why in failed.items() if name not in keys}
    found = {**about, "cases": rows, "failed": errors, "maps": maps, "other failures": others}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def golden_records() -> dict[str, dict[str, Any]]:
    """Records of devices, by the file's name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json"))}


def not_recorded(record: dict[str, Any]) -> list[str]:
    """Cases that are not in a record with the text and inputs that they have now: they are to be recorded anew."""
    found = []
    for case in cases():
        entries = record["cases"].get(case.name), record["failed"].get(case.name)
        if case.key not in {entry["key"] for entry in entries if entry is not None}:
            found.append(case.name)
    return found


def disagreements(record: dict[str, Any]) -> list[str]:
    """What a record and this project say differently: of each case, of its model, and of tensor maps.

    A case that failed on the device must not run here, unless the emulator declines it anyway.
    """
    found = []
    unheld = not_recorded(record)
    for case in cases():
        row, failed = record["cases"].get(case.name), record["failed"].get(case.name)
        if case.name in unheld:
            continue
        if not case.refused and row is None:
            found.append(f"{case.name}: failed on the device ({failed['error']}), and the emulator takes it")
        elif not case.refused:
            found.append(case.difference(case.run_emulated(), unpacked(row)))
            if case.model is not None and record["device"] != "emulator":
                found.append(
                    replace(case, name=f"{case.name}'s model", within=0.0).difference(case.model(), unpacked(row))
                )
    found += [
        f"tensor map {name}: the driver says {row['driver']}, dsagen.tensor_map {row['ours']}"
        for name, row in record["maps"].items()
        if not row["agree"]
    ]
    return [text for text in found if text]
