"""What cannot be written after a run, and what a run cannot be about, is said before it."""

from __future__ import annotations

import pytest

from dsagen.bench import plots
from dsagen.build.bundle import require_free
from dsagen.check import run as check_run
from dsagen.cli import main
from dsagen.errors import StoreError
from dsagen.evidence import require_recordable
from dsagen.output_paths import require_appendable, require_folder


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path):
    new, old = tmp_path / "new" / "rows.jsonl", tmp_path / "old.jsonl"
    old.write_text("kept\n")
    require_appendable(new, "evidence")
    require_appendable(old, "evidence")
    assert not new.exists() and old.read_text() == "kept\n"
    require_folder(tmp_path / "pictures", "pictures")
    assert list((tmp_path / "pictures").iterdir()) == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda path: require_appendable(path, "evidence"), "evidence cannot be written"),
        (lambda path: require_folder(path, "pictures"), "pictures cannot be written"),
        (require_recordable, "evidence cannot be written"),
        (require_free, "the bundle rows cannot be written"),
    ],
)
def test_what_lies_under_a_file_is_refused(tmp_path, check, text):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=rf"{text} \(.*\): name another"):
        check(tmp_path / "file" / "rows")


@pytest.fixture
def nothing_runs(monkeypatch):
    def ran(*_, **__):
        pytest.fail("something ran first")

    for name in ("host_proofs", "run_cases", "KernelCache"):
        monkeypatch.setattr(check_run, name, ran)
    monkeypatch.setattr(check_run.machine, "is_kept", lambda: False)
    monkeypatch.setattr("dsagen.bench.sweep.run_sweep", ran)
    monkeypatch.setattr("dsagen.bench.sweep.current_device_name", lambda: "NVIDIA H200")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["check", "v32_h16", "--device", "emulator", "--only", "nonsense*"], 2, "no case of the quick tier matches"),
        (["check", "v32_h16", "v32_topk_h128", "--device", "emulator", "--only", "topk.*"], 2, "v32_h16: no case"),
        (["check", "v32_h16", "no_such_spec", "--device", "emulator"], 2, "no_such_spec"),
        (["emulate", "v32_h16", "v32_topk_h128", "--only", "width.*"], 2, "v32_topk_h128: no case"),
        (["check", "v32_h16", "--device", "emulator", "--record", "FILE/rows"], 3, "evidence cannot be written"),
        (["bench", "v32_h16", "--record", "FILE/rows"], 3, "evidence cannot be written"),
        (["check", "v32_h16", "--device", "emulator", "--only", "width.*", "--record", "x"], 2, "is no evidence"),
        (["bench", "v32_h16", "--host", "--batch", "3"], 2, "--batch: means nothing beside --host"),
        (["bench", "v32_h16", "--recorded", "--json", "--s-q", "3"], 2, "--s-q: means nothing beside --recorded"),
        (["explain", "v32_h16", "--sms", "3"], 2, "explain --sms is about a call: add --batch"),
        (["explain", "v32_h16", "--s-q", "1"], 2, "explain --s-q is about a call: add --batch"),
        (["explain", "v32_h16", "--batch", "3", "--width", "9"], 2, "v32_h16 has no topk or indexer_logits: leave it"),
        (["bench", "v32_h16", "--plot", "FILE/pictures"], 3, "--plot's pictures cannot be written"),
    ],
)
@pytest.mark.usefixtures("nothing_runs")
def test_a_request_is_looked_at_before_anything_is_compiled_or_run(
    capsys, tmp_path, monkeypatch, arguments, code, text
):
    monkeypatch.setattr(plots, "_pyplot", lambda: None)
    (tmp_path / "FILE").write_text("")
    found = main([argument.replace("FILE", str(tmp_path / "FILE")) for argument in arguments])
    said = capsys.readouterr().err
    assert text in said and "compil" not in said
    assert found == code
