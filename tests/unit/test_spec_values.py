"""Values, escapes and paths that no spec has: each ends in a SpecError that says which, and never in another error."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from dsagen.arch import arch
from dsagen.errors import SpecError
from dsagen.runtime.driver import DriverError
from dsagen.spec import InvalidSpecError, KvSpec, LseSpec, load_spec, parse_spec

BASE = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["sparse_decode"]}
YAML = "model: v32\nheads: 16\narchs: [sm_90a]\nops: [sparse_decode]\n"


class Hostile:
    """Cannot be printed and cannot be compared."""

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no text")

    def __eq__(self, other):
        raise RuntimeError("no equality")


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


ITSELF: dict = {}
ITSELF["kv"] = ITSELF


@pytest.mark.parametrize("key", ["name", "model", "heads", "archs", "ops", "kv", "extra_kv", "topk", "dims", "lse"])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Hostile(), "is of type Hostile"),
        (torch.tensor([1, 2]), "is of type Tensor"),
        (b"v32", "is of type bytes"),
        ({1, 2}, "is of type set"),
        (nested(10**5), "nested deeper than 8 levels"),
        (ITSELF, "nested deeper than 8 levels"),
        (10**5000, "is an integer of 16610 bits"),
        ("x" * 10**6, "is a text of 1000000 characters"),
        ("\ud800", "holds a surrogate"),
        ({1: 2}, "keys must be text, found 1 of type int"),
        ({Hostile.__name__: [Hostile()]}, "is of type Hostile"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_foreign_value_is_named_with_its_key(key, value, says):
    with pytest.raises(SpecError) as caught:
        load_spec({**BASE, key: value})
    text = str(caught.value)
    assert text.startswith(f"spec: {key}"), text
    assert says in text, text
    assert len(text) < 300


def test_parts_of_a_spec_are_values_too():
    spec = load_spec({**BASE, "lse": LseSpec(base=2), "kv": KvSpec(format="bf16", layout="interleaved", scale="none")})
    assert (spec.lse.base, spec.kv.format_id) == (2, "bf16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name: "\\UFFFFFFFF"\n' + YAML, "an escape such as"),
        ('name: "\\U00110000"\n' + YAML, "an escape such as"),
        (f"%YAML 1.{'9' * 5000}\n---\n{YAML}", "a %YAML version no number"),
        (YAML + 'name: "\\ud800"\n', "f.yaml:5: name = '\\ud800': holds a surrogate"),
        (YAML + "name: {{ 7*7 }}\n", "f.yaml:5: a key must be a word, found a mapping (text with braces needs quotes)"),
        (YAML + "[1, 2]: 3\n", "f.yaml:5: a key must be a word, found a list"),
        (YAML.replace("v32", "~"), "unknown model None: known are"),
    ],
)
def test_yaml_that_the_parser_itself_trips_over(text, says):
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "f.yaml")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("value", "meant"), [(90, "sm_90a"), (9.0, "sm_90a"), (10.0, "sm_100a"), (80, "sm_80"), (None, ""), ([], "")]
)
def test_an_arch_that_is_no_text_names_the_row_it_stands_for(value, meant):
    with pytest.raises(SpecError) as caught:
        arch(value)
    hint = f" (did you mean {meant}?)" if meant else ""
    assert str(caught.value).startswith(f"unknown arch {value!r}{hint}: known are sm_80")


def test_paths_that_the_system_refuses(monkeypatch, tmp_path):
    with pytest.raises(SpecError, match="cannot be read: File name too long"):
        load_spec("a" * 5000)
    with pytest.raises(SpecError, match=r"spec 'a\\nb\\x1b\[31m': no such file"):
        load_spec("a\nb\x1b[31m")

    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"pipe\.yaml: is no regular file; shipped"):
        load_spec(tmp_path / "pipe.yaml")
    for name in ("loop.yaml", "dangling.yaml"):
        (tmp_path / name).symlink_to("loop.yaml" if name == "loop.yaml" else "nothing")
        with pytest.raises(SpecError, match=f"{name}: is a link to nothing; shipped"):
            load_spec(tmp_path / name)

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(SpecError, match=r"spec /locked/mine\.yaml: cannot be read: Permission denied"):
        load_spec("/locked/mine.yaml")


def test_errors_survive_the_way_between_processes():
    with pytest.raises(InvalidSpecError) as caught:
        parse_spec(YAML + "topk: 0\nzzz: 1\n", "f.yaml")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)
    with pytest.raises(SpecError) as other:
        load_spec({"heads": 1})
    assert str(pickle.loads(pickle.dumps(other.value))) == str(other.value)
    driver = DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", "none")
    copied = pickle.loads(pickle.dumps(driver))
    assert (str(copied), copied.code) == (str(driver), driver.code)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("ops", "decode", "ops = 'decode': must be a list: write [decode]"),
        ("ops", "", "ops = '': must be a list of names"),
        ("ops", [], "ops = []: must list at least one"),
        ("ops", ["decode"], "ops[0] = 'decode': is no op"),
        ("kv", 5, "kv = 5: must be a mapping"),
    ],
)
def test_what_follows_from_a_wrong_value_is_not_told_too(key, value, text):
    parts = {"kv_write": {"rows": "bf16"}, "index": {"keys": "fp8"}, "index_write": {"rows": "bf16"}}
    ops = ["indexer_logits", "kv_cache", "index_cache"]
    good = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ops, **parts}
    load_spec(good)
    with pytest.raises(SpecError) as caught:
        load_spec({**good, key: value})
    assert str(caught.value).startswith(f"spec: {text}") and str(caught.value).count("spec: ") == 1
