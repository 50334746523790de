"""Streams, folders and options that are not as a command expects: an error line and an exit code, no traceback."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsagen.cli import main
from dsagen.log import configure_logging

ROOT = Path(__file__).resolve().parents[2]
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def shell(script: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell script in which $DSAGEN is the command line."""
    return subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DSAGEN": f"{sys.executable} -m dsagen",
            "DSAGEN_CACHE_DIR": str(cwd / "no-store"),
            **environment,
        },
    )


@needs_dev_full
@pytest.mark.parametrize("command", ["list", "schema", "--version", "explain v32_h16"])
def test_standard_output_on_a_full_disk(command):
    done = shell(f"$DSAGEN {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: No space left on device: standard output\n")


@needs_dev_full
def test_the_exit_code_stands_where_the_error_cannot_be_printed():
    assert shell("$DSAGEN list v32_h61 2> /dev/full").returncode == 2


def test_a_reader_that_leaves_is_no_error():
    done = shell("{ $DSAGEN list; echo $? >&2; } | true")
    assert done.stderr in ("0\n", "141\n")


@pytest.mark.parametrize("command", ["list", "list --json", "schema", "explain v32_h16"])
def test_a_reader_that_has_left_before_is_told_by_the_code(command):
    # A pipe without a reader from the start, so that the write is sure to fail.
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dsagen", *command.split()],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DSAGEN_CACHE_DIR": str(ROOT / "no-store")},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "command",
    ["explain v32_h16 --html /proc/x", "render v32_h16 --out /proc/x", "compile-commands v32_h16 --out /proc/x"],
)
def test_an_output_that_cannot_be_written_is_one_kind_of_error(capsys, command):
    assert main(command.split()) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "cannot be written" in captured.err


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_closed_streams(tmp_path, closed):
    script = f"$DSAGEN render v32_h16 --out {tmp_path} {closed}; echo $? > {tmp_path}/code"
    shell(script)
    assert (tmp_path / "code").read_text() == "0\n"
    assert len(list(tmp_path.glob("generated/*/*.cu"))) == 2


@pytest.mark.compile
def test_a_build_without_standard_error(session_store, tmp_path):
    script = f"$DSAGEN build v32_h16 --out {tmp_path} 2>&-"
    assert shell(script, DSAGEN_CACHE_DIR=str(session_store)).returncode == 0


@pytest.mark.parametrize("command", ["list", "build v32_h16", "check v32_h16", "doctor"])
def test_a_current_folder_that_is_gone(tmp_path, command):
    gone = tmp_path / "gone"
    done = shell(f"mkdir {gone} && cd {gone} && rmdir {gone} && $DSAGEN {command}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current folder cannot be used (No such file or directory)")


def test_an_interrupt_while_modules_load_is_one_too(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = shell("$DSAGEN list", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize("text", ["", ",", "sm_90a,", " "])
def test_an_empty_arch_is_not_all_of_them(capsys, text):
    assert main(["list", "v32_h16", "--arch", text]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        f"error: --arch {text!r}: an element is empty; expected a list such as sm_90a,sm_100a\n",
    )


def test_one_document_on_standard_output(capsys, monkeypatch):
    assert main(["list", "v32_h16", "--markdown", "--json"]) == 2
    assert capsys.readouterr() == ("", "error: list prints --markdown or --json, not both: leave one out\n")
    monkeypatch.setenv("DSAGEN_LOG_DEST", "stdout")
    assert main(["list", "v32_h16", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: DSAGEN_LOG_DEST='stdout': with --json only the document goes there")


@needs_dev_full
def test_a_log_on_a_full_disk_is_told_once():
    done = shell("$DSAGEN -vv list v32_h16; $DSAGEN -vv explain v32_h16 > /dev/null", DSAGEN_LOG_DEST="/dev/full")
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "Logging error" not in done.stderr


@needs_dev_full
def test_every_line_after_the_first_lost_one_is_silent(capsys, monkeypatch):
    monkeypatch.setenv("DSAGEN_LOG_DEST", "/dev/full")
    configure_logging(2)
    try:
        logging.getLogger("dsagen").info("one")
        logging.getLogger("dsagen").info("two")
    finally:
        monkeypatch.delenv("DSAGEN_LOG_DEST")
        configure_logging()
    assert capsys.readouterr().err == "dsagen: DSAGEN_LOG_DEST='/dev/full': No space left on device\n"


def test_a_log_into_a_pipe_is_not_waited_for(capsys, monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("DSAGEN_LOG_DEST", str(tmp_path / "pipe"))
    assert main(["list", "v32_h16"]) == 2
    assert "cannot be written (a pipe, whose reader would be waited for)" in capsys.readouterr().err


def test_a_seed_that_no_generator_takes(capsys):
    assert main(["check", "v32_h16", "--seed", str(2**63)]) == 2
    assert "9223372036854775808 is not in the range 0<=x<=9223372036854775807" in capsys.readouterr().err


def test_the_doctor_looks_at_places_that_it_may_not_see(capsys, monkeypatch):
    monkeypatch.setenv("DSAGEN_CACHE_DIR", "/" + "x" * 5000)
    monkeypatch.setenv("CUDA_HOME", "/" + "y" * 5000)
    monkeypatch.setenv("DSAGEN_PEER_SITE", "/" + "z" * 5000)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "no folder of the kernel store can be written" in out
    assert "is not an existing folder given by an absolute path" in out
    assert "cannot be read (File name too long)" in out


@pytest.mark.parametrize(
    ("spec", "option", "readers"),
    [
        ("v32_indexer_h128", "--topk", "sparse_decode or topk"),
        ("v32_kv_cache_h128", "--topk", "sparse_decode or topk"),
        ("v32_kv_cache_h128", "--sms", "sparse_decode or topk or indexer_logits"),
        ("v32_index_cache_h128", "--width", "topk or indexer_logits"),
    ],
)
def test_explain_of_a_call_refuses_what_no_op_of_the_spec_reads(capsys, spec, option, readers):
    assert main(["explain", spec, "--batch", "4", option, "9"]) == 2
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", f"error: explain {option}: {spec} has no {readers}: leave it out\n")


def test_an_empty_list_of_formats_is_not_that_of_the_spec(capsys):
    assert main(["bench", "v32_h16", "--kv", ""]) == 2
    assert "error: spec: kv.format = '': unknown KV format ''" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "v32_h16", "--html"),
        ("build", "v32_h16", "--out"),
        ("render", "v32_h16", "--out"),
        ("compile-commands", "v32_h16", "--out"),
        ("bundle", "v32_h16", "--output"),
        ("check", "v32_h16", "--record"),
        ("bench", "v32_h16", "--record"),
        ("bench", "v32_h16", "--plot"),
        ("tune", "v32_h16", "--output"),
        ("verify",),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_folder(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, ""]) == 2
    found = capsys.readouterr()
    assert found.out == "" and not list(tmp_path.iterdir())
    assert "'' names neither a file nor a folder: name one, or leave the option out" in found.err
