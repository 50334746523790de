"""Reading a build log: the figures of ptxas per kernel, what the build refuses, and the first real error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsagen.arch import MAX_REGISTERS_PER_THREAD
from dsagen.guard import failures
from dsagen.limits import BUILD_GUARDS

_FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?([\w$.]+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_PARTS = {
    "barriers": re.compile(r"used (\d+) barriers"),
    "smem_static_bytes": re.compile(r"(\d+) bytes smem"),
    "constant_bytes": re.compile(r"(\d+) bytes cmem\[0\]"),
}
# ptxas reports lost performance (setmaxnreg ignored, wgmma serialised, ...) as "info" lines with these codes.
_PERFORMANCE_CODE = re.compile(r"\(C75\d\d\)")
_ERROR_LINE = re.compile(r"\b(?:error|fatal)\b", re.IGNORECASE)
_SUMMARY_LINE = re.compile(r"\d+ errors? detected|compilation aborted", re.IGNORECASE)
_KILLED = re.compile(r"died due to signal 9|\bKilled\b")
_KILLED_EXIT_CODES = (137, -9)
_HINTS = (
    (
        re.compile(r"Unsupported \.version"),
        "cicc and ptxas are of two releases; single nvidia-cuda-* wheels mix them: "
        "install pip's cuda-toolkit[nvcc,cccl], which pins its parts",
    ),
    (
        re.compile(r"Failed to preprocess host compiler|(?:gcc|g\+\+|cc1plus)\b.*(?:No such file|not found)"),
        "the host compiler that nvcc calls is missing or broken; install g++",
    ),
    (
        re.compile(r"Unsupported gpu architecture|not defined for option 'gpu-name'"),
        "this CUDA release does not know the arch; use a newer nvcc",
    ),
    (re.compile(r"No space left on device"), "the disk of the store or of TMPDIR is full"),
)


@dataclass(frozen=True)
class KernelReport:
    """The figures of one kernel: per thread (registers, stack, spills) or per block (barriers, shared memory)."""

    symbol: str
    registers: int
    barriers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_static_bytes: int
    constant_bytes: int
    performance_messages: tuple[str, ...] = ()


def parse_report(log: str, symbol: str) -> KernelReport | None:
    """The report on entry `symbol`; None where the log holds none.

    Stack and spills are the largest over all functions of the unit, since a called function's count as well.
    """
    current = ""
    stacks: list[tuple[int, int, int]] = []
    used_line = ""
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            current = match[1]
        elif match := _STACK.search(line):
            stacks.append((int(match[1]), int(match[2]), int(match[3])))
        elif _USED.search(line) and current == symbol:
            used_line = line
    registers = _USED.search(used_line)
    if registers is None or not stacks:
        return None
    parts = {name: int(found[1]) if (found := pattern.search(used_line)) else 0 for name, pattern in _PARTS.items()}
    messages = tuple(dict.fromkeys(line.strip() for line in log.splitlines() if _PERFORMANCE_CODE.search(line)))
    stack, stores, loads = (max(column) for column in zip(*stacks, strict=True))
    return KernelReport(
        symbol=symbol,
        registers=int(registers[1]),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        performance_messages=messages,
        **parts,
    )


def refusal(report: KernelReport, plan: Mapping[str, Any]) -> str | None:
    """The first build guard that a compiled kernel breaks, as its message, or None.

    Of the plan it reads `allow_spill_bytes`, `registers_cap` and `moves_registers`, where they are.
    """
    values = {
        "stack_bytes": report.stack_bytes,
        "spill_store_bytes": report.spill_store_bytes,
        "spill_load_bytes": report.spill_load_bytes,
        "allow_spill_bytes": int(plan.get("allow_spill_bytes", 0)),
        "performance_messages": len(report.performance_messages),
        "registers": report.registers,
        "registers_cap": int(plan.get("registers_cap", MAX_REGISTERS_PER_THREAD)),
        "moves_registers": bool(plan.get("moves_registers", False)),
    }
    first_message = next(iter(report.performance_messages), "")
    refused = failures(BUILD_GUARDS, values, symbol=report.symbol, first_message=first_message)
    return refused[0] if refused else None


def first_error(log: str) -> str:
    """The first line of the log that states an error, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if _ERROR_LINE.search(line) and not _SUMMARY_LINE.search(line):
            return line
    return lines[-1] if lines else "the compiler printed nothing"


def was_killed(log: str, exit_code: int | None) -> bool:
    """True when a compiler process was killed, which on Linux nearly always means that memory ran out."""
    return exit_code in _KILLED_EXIT_CODES or _KILLED.search(log) is not None


def hint(log: str, exit_code: int | None, jobs: int) -> str | None:
    """What to do about a failure whose cause is known, or None."""
    if was_killed(log, exit_code):
        return (
            f"the compiler was killed, most likely because memory ran out with {jobs} jobs at once; "
            "lower DSAGEN_MAX_JOBS or raise DSAGEN_JOB_MEM_GB"
        )
    return next((advice for pattern, advice in _HINTS if pattern.search(log)), None)
