"""The README's examples are true: specs load, commands exist, the serving code runs."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

import dsagen
from dsagen import errors
from dsagen.cli.app import cli
from dsagen.matrix import expand
from dsagen.spec import load_spec, parse_spec

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


# What the serving code calls loaded kernels.
KERNELS = {"kernels", "selection", "caches", "v41", "gqa", "engine", "index_keys", "chain"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_specs_load_and_can_be_built(text: str) -> None:
    spec = parse_spec(text)
    expand(spec).require_complete()


def test_the_shipped_spec_is_shown_as_it_is() -> None:
    shown, shipped = parse_spec(blocks("yaml")[0]), load_spec("v41_h128")
    assert shown.replace(name="v41_h128") == shipped


def test_commands_and_their_options_exist() -> None:
    commands = re.findall(r"dsagen ([a-z]+)((?: [^\s`#|]+)*)", "\n".join(blocks("sh")))
    assert {"build", "list", "explain", "check"} <= {name for name, _ in commands}
    for name, rest in commands:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options


def test_the_command_table_is_complete() -> None:
    listed = re.findall(r"^\| `dsagen ([a-z-]+)", README, re.MULTILINE)
    assert sorted(listed) == sorted(cli.commands)


def test_the_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \|([^|]*)\|$", README, re.MULTILINE)
    told = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}
    raised = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert told == {name: kind.exit_code for name, kind in raised.items()}


def test_the_serving_code_uses_what_exists() -> None:
    from dsagen.runtime.api import Kernels

    code = "\n".join(blocks("python"))
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in KERNELS
    }
    assert {"sparse_decode", "topk", "kv_write", "kv_read"} <= used
    assert all(hasattr(Kernels, name) for name in used)


@pytest.mark.compile
def test_the_decode_loop_runs_on_the_emulator(shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small loop, and with a graph that is the step itself: the emulator captures none."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    (code,) = (text for text in blocks("python") if "CUDAGraph" in text)
    changes = {"= 4, 8, 16, 100": "= 2, 3, 1, 2", "**ops})": '**ops}, device="emulator")'}
    # A capture runs nothing.
    changes["with torch.cuda.graph(graph):\n    step()\n"] = ""
    for there, here in changes.items():
        assert there in code
        code = code.replace(there, here)
    names: dict[str, Any] = {"dsagen": dsagen, "torch": torch}
    replayed = SimpleNamespace(replay=lambda: names["step"]())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: replayed)
    exec(compile(code, "README.md", "exec"), names)
    for pool in names["pools"]:
        written = pool.view(3, 64, 656).any(2)
        assert written.sum(1).tolist() == [2, 2, 0]
    attended = names["attended"]
    assert bool(attended[:-1].any()) and not bool(attended[-1].any())


@pytest.mark.compile
def test_the_decode_step_runs_on_the_emulator(shared_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short requests: from the declaration to the output in 20 lines."""
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(shared_store))
    (code,) = (text for text in blocks("python") if "plan_decode_step" in text)
    (declared,) = (text for text in blocks("yaml") if "v32_decode_h16" in text)
    assert parse_spec(declared).replace(name="v32_decode_h16") == load_spec("v32_decode_h16")
    assert len([*declared.splitlines()[1:], *code.partition("next_out")[0].splitlines()]) <= 20
    changes = {'"v32_decode_h16")': '"v32_decode_h16", device="emulator")', "= 4, 1024, 16384,": "= 4, 12, 192,"}
    for there, here in {**changes, "[1, 2000, 5000, longest]": "[0, 1, 100, longest]"}.items():
        assert there in code
        code = code.replace(there, here)
    names: dict[str, Any] = {"dsagen": dsagen, "torch": torch}
    exec(compile(code, "README.md", "exec"), names)
    assert names["step_plan"].counts.flatten().tolist() == [0, 1, 100, 192]
    assert names["step_lse"][:, 0, 0].tolist() == pytest.approx([torch.inf, 0.0, 4.60517, 5.25750], abs=1e-4)
    assert names["next_out"].equal(names["step_out"])


@pytest.mark.gpu
def test_the_serving_code_runs() -> None:
    code = "\n".join(blocks("python"))
    names: dict[str, object] = {"dsagen": dsagen}
    exec(compile(code, "README.md", "exec"), names)
    out, lse = names["out"], names["lse"]
    assert (tuple(out.shape), tuple(lse.shape)) == ((128, 1, 16, 512), (128, 16, 1))
    # A cache of zeros: every row has the same logit 0, so the lse is the logarithm of the width.
    assert bool((out == 0).all())
    assert bool(((lse - 7.6246).abs() < 1e-3).all())
    rows, again = names["rows"], names["rows_again"]
    assert bool(((rows - again).abs() <= rows.abs().amax(1, keepdim=True) / 16).all())
    attended = names["attended"]
    assert bool(attended[:-1].any()) and not bool(attended[-1].any())
    del sys.modules["flash_mla"]
    ids, lengths = names["ids"], names["lengths"]
    assert bool(((ids >= 0).sum(1) == lengths.clamp(max=2048)).all())
