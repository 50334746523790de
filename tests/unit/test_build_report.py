"""Reading logs: figures, refusals, the first error line and the hints."""

from dataclasses import replace

import pytest
from fake_toolchain import GOOD_LOG

from dsagen.build.report import KernelReport, first_error, hint, parse_report, refusal, was_killed

CLEAN = KernelReport("dsa_fake", 168, 9, 0, 0, 0, 512, 400)


def test_figures_of_a_clean_kernel():
    assert parse_report(GOOD_LOG, "dsa_fake") == CLEAN
    assert refusal(CLEAN, {}) is None


def test_the_entry_is_found_among_several_functions():
    log = (
        "ptxas info    : Compiling entry function 'dsa_other' for 'sm_90a'\n"
        "ptxas info    : Function properties for dsa_other\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 10 registers, used 1 barriers\n"
        + GOOD_LOG
        + "ptxas info    : Function properties for called\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
    )
    report = parse_report(log, "dsa_fake")
    assert report == replace(CLEAN, stack_bytes=16, spill_store_bytes=8, spill_load_bytes=4)
    assert parse_report(log, "dsa_other").registers == 10
    assert parse_report(log, "dsa_missing") is None
    assert parse_report("", "dsa_fake") is None


@pytest.mark.parametrize("figure", ["stack_bytes", "spill_store_bytes", "spill_load_bytes"])
def test_stack_and_spills_are_refused_unless_planned(figure):
    report = replace(CLEAN, **{figure: 16})
    assert "16 bytes" in refusal(report, {})
    assert "the plan allows 8 (allow_spill_bytes)" in refusal(report, {"allow_spill_bytes": 8})
    assert refusal(report, {"allow_spill_bytes": 16}) is None


def test_performance_messages_are_refused_whatever_the_plan():
    message = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'dsa_fake'"
    )
    report = parse_report(f"{message}\n{GOOD_LOG}{message}\n", "dsa_fake")
    assert report.performance_messages == (message,)
    assert message in refusal(report, {"allow_spill_bytes": 1 << 20})


def test_registers_are_held_to_the_plan():
    assert refusal(CLEAN, {"registers_cap": 168, "moves_registers": True}) is None
    assert refusal(CLEAN, {"registers_cap": 176, "moves_registers": False}) is None
    assert refusal(CLEAN, {"registers_cap": 160}).startswith("[B-03] dsa_fake takes 168 registers a thread, its plan")
    too_few = refusal(CLEAN, {"registers_cap": 176, "moves_registers": True})
    assert too_few.startswith("[B-04] dsa_fake takes 168 registers a thread and moves registers between warps")
    assert "exactly 176" in too_few


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            'kernel.cu(3): warning #177-D: unused\nkernel.cu(12): error: identifier "x" is undefined\n\n'
            '1 error detected in the compilation of "kernel.cu".\n',
            'kernel.cu(12): error: identifier "x" is undefined',
        ),
        (
            "ptxas kernel.ptx, line 31; error   : Instruction 'wgmma.fence' not supported on .target 'sm_100a'\n"
            "ptxas fatal   : Ptx assembly aborted due to errors\n",
            "ptxas kernel.ptx, line 31; error   : Instruction 'wgmma.fence' not supported on .target 'sm_100a'",
        ),
        (
            "kernel.cu:1:10: fatal error: cuda_fp8.h: No such file or directory\n",
            "kernel.cu:1:10: fatal error: cuda_fp8.h",
        ),
        ("something odd\nlast words\n", "last words"),
        ("", "the compiler printed nothing"),
    ],
)
def test_first_error(log, line):
    assert first_error(log).startswith(line)


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", 9, "memory ran out with 6 jobs"),
        ("", 137, "DSAGEN_MAX_JOBS"),
        ("sh: line 1: 4711 Killed   nvcc\n", 1, "memory ran out"),
        ("ptxas fatal   : Unsupported .version 9.5; current version is '9.0'\n", 255, "cuda-toolkit[nvcc,cccl]"),
        ("gcc: No such file or directory\nnvcc fatal   : Failed to preprocess host compiler properties.\n", 1, "g++"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_107a'\n", 1, "newer nvcc"),
        ("fatal error: error writing to /tmp/x: No space left on device\n", 1, "TMPDIR"),
    ],
)
def test_known_causes_get_a_hint(log, code, words):
    assert words in hint(log, code, jobs=6)


def test_an_ordinary_error_gets_no_hint():
    log = "kernel.cu(12): error: expected a ;\n"
    assert hint(log, 2, jobs=6) is None
    assert not was_killed(log, 2)
