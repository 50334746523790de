"""Run every case on a device or on the emulator, and store what came out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from calibration.children import Outcome, record, serve
from calibration.records import cases, disagreements, not_recorded, packed, write
from dsagen.build import find_toolchain
from dsagen.errors import EmulatorError


def emulated() -> Outcome:
    """Every case in this process; what the emulator declines is told as such."""
    outcome = Outcome(about={"device": "emulator", "driver": "none"})
    for case in cases():
        try:
            outcome.rows[case.name] = packed(case, case.run_emulated())
        except EmulatorError as error:
            if not case.refused:
                raise
            outcome.failed[case.name] = str(error)
    return outcome


def main(device: str, out: str, seconds: float = float("inf")) -> int:
    """Store the record; how many cases there are goes to stdout, and what failed."""
    toolchain = None if device == "emulator" else find_toolchain()
    outcome = emulated() if toolchain is None else record(device, cases(), toolchain, seconds)
    if toolchain is not None:
        # Not ahead of it, for it brings torch along.
        from dsagen.check.recording import driver_version

        outcome.about["driver"] = driver_version()
    outcome.about["toolkit"] = toolchain.version if toolchain is not None else "none"
    write(Path(out), outcome.about, outcome.rows, outcome.failed, outcome.maps)
    about = outcome.about.get("device", "no device")
    print(f"{len(outcome.rows)} cases of {about} in {out}, {len(outcome.failed)} failed or declined")
    if toolchain is not None:
        for name, why in outcome.failed.items():
            print(f"  {name}: {why[:200]}")
        for name, row in outcome.maps.items():
            if not row["agree"]:
                print(f"  tensor map {name}: the driver says {row['driver']}, we {row['ours']}")
    return 0 if outcome.rows else 1


def compare(path: str) -> int:
    """Print what a record and the emulator say differently, and which cases it does not have."""
    record = json.loads(Path(path).read_text())
    found, missing = disagreements(record), not_recorded(record)
    print("\n".join([*found, *(f"{name}: not recorded as it is now" for name in missing)]))
    print(f"{len(found)} disagreements of {len(cases()) - len(missing)} cases, {len(missing)} are not in the record")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.calibration")
    parser.add_argument("device", help="a CUDA device's number, `emulator`, or `compare`")
    parser.add_argument("file", help="where the record goes, or lies")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what has not begun then is left out")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(sys.argv[2], sys.stdin, sys.stdout)
        sys.exit(0)
    asked = _arguments()
    sys.exit(compare(asked.file) if asked.device == "compare" else main(asked.device, asked.file, asked.seconds))
