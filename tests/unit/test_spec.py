# ruff: noqa: E501  (rows of tables quote whole messages)
import json
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dsagen import spec_source
from dsagen.arch import ARCHS
from dsagen.errors import SpecError
from dsagen.kv_format import KV_FORMATS
from dsagen.model import CUSTOM, MODELS
from dsagen.spec import (
    DeploymentSpec,
    InvalidSpecError,
    json_schema,
    known_ops,
    load_spec,
    parse_spec,
    resolve_spec_path,
    shipped_spec_folder,
    shipped_specs,
)

BASE = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["sparse_decode"]}
BASE_YAML = "model: v32\nheads: 16\narchs: [sm_90a]\nops: [sparse_decode]\n"


def refusal(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(textwrap.dedent(text), "f.yaml")
    return str(caught.value)


def changed(**changes) -> str:
    """The base spec as YAML with keys replaced; None removes one."""
    data = {**BASE, **changes}
    return yaml.safe_dump({k: v for k, v in data.items() if v is not None}, sort_keys=False)


# --- what a good spec means ------------------------------------------------------------------------------------------


def test_four_lines_are_a_spec():
    spec = parse_spec(BASE_YAML)
    assert (spec.name, spec.heads, spec.archs, spec.ops, spec.topk) == (
        "v32_h16",
        16,
        ("sm_90a",),
        ("sparse_decode",),
        2048,
    )
    assert spec.kv_format is KV_FORMATS["v32"]
    assert spec.extra_kv is spec.extra_kv_format is None
    assert (spec.dims.d_qk, spec.dims.d_v) == (576, 512)
    assert (spec.lse.base, spec.lse.empty, spec.determinism) == ("e", "+inf", "off")
    assert spec.arch_rows == (ARCHS["sm_90a"],)
    assert spec.sm_scale == MODELS["v32"].sm_scale


def test_what_is_declared_overrides_the_preset():
    spec = parse_spec(
        BASE_YAML + "name: mine\nkv: {format: v32, scale: fp32_pow2}\ntopk: 512\n"
        "lse: {base: 2, empty: -inf}\ndeterminism: batch_invariant\n"
    )
    assert spec.name == "mine"
    assert spec.kv.format_id == "v32_pow2"
    assert (spec.topk, spec.lse.base, spec.lse.empty, spec.determinism) == (512, 2, "-inf", "batch_invariant")


def test_off_is_a_word_and_not_a_boolean():
    assert parse_spec(BASE_YAML + "determinism: off\n").determinism == "off"


def test_archs_are_normalised():
    assert parse_spec(changed(archs=["9.0a", "sm80", "121A"])).archs == ("sm_90a", "sm_80", "sm_121a")


def test_second_cache_follows_the_main_layout():
    spec = parse_spec(changed(model="v41", kv={"layout": "page_split"}))
    assert (spec.kv.format_id, spec.extra_kv.format_id) == ("v41_page_split", "v41_fp4_page_split")
    assert (spec.topk, spec.extra_kv.topk) == (128, 512)
    assert parse_spec(changed(model="v41", extra_kv="none")).extra_kv is None
    assert parse_spec(changed(model="v41", extra_kv={"topk": 64})).extra_kv.topk == 64


def test_bf16_takes_the_width_of_the_model():
    assert parse_spec(changed(kv="bf16")).kv.format_id == "bf16"
    assert parse_spec(changed(model="glm5_nope", kv="bf16")).kv.format_id == "bf16_d512"


def test_custom_takes_its_dims_from_the_format():
    spec = parse_spec(changed(model=CUSTOM, kv="v4", topk=100))
    assert (spec.dims.d_qk, spec.dims.d_v, spec.sm_scale) == (512, 512, 512**-0.5)


@pytest.mark.parametrize("heads", [1, 7, 24, 61, 128])
def test_any_head_count_up_to_128(heads):
    assert parse_spec(changed(heads=heads)).heads == heads


# --- shipped specs, round trips, paths -------------------------------------------------------------------------------


def test_shipped_specs_are_the_announced_ones():
    announced = {f"v32_h{h}" for h in (8, 16, 32, 64, 128)} | {"v32_bf16_h128", "v32_topk_h128", "v41_h128"}
    announced |= {f"{name}_h16" for name in ("v32_decode", "v32_decode_histogram", "v4_decode", "v41_decode")}
    announced |= {"contest_indexer_h64", "contest_attention_h16"}
    assert announced <= set(shipped_specs())


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_spec_is_named_after_its_file_and_round_trips(name):
    spec = load_spec(name)
    assert spec.name == name
    assert str(spec.heads) == name.rpartition("_h")[2]
    assert parse_spec(spec.to_yaml()) == spec
    assert parse_spec(spec.to_json()) == spec
    assert load_spec(spec.to_mapping()) == spec
    assert load_spec(spec) is spec
    assert hash(load_spec(name)) == hash(spec)


def test_v41_declares_its_second_cache():
    spec = load_spec("v41_h128")
    assert spec.extra_kv.format_id == "v41_fp4_interleaved"
    assert spec.to_mapping()["extra_kv"]["topk"] == 512


@st.composite
def spec_mappings(draw):
    model = draw(st.sampled_from([m for m in MODELS if m != CUSTOM]))
    data = {
        "model": model,
        "heads": draw(st.integers(1, 128)),
        "archs": draw(st.lists(st.sampled_from(list(ARCHS)), min_size=1, max_size=3, unique=True)),
        "ops": [draw(st.sampled_from(known_ops()))],
        "determinism": draw(st.sampled_from(["off", "batch_invariant"])),
        "lse": {"base": draw(st.sampled_from(["e", 2])), "empty": draw(st.sampled_from(["+inf", "-inf"]))},
    }
    fitting = [name for name, record in KV_FORMATS.items() if record.d_qk == MODELS[model].d_qk]
    if draw(st.booleans()):
        kv = draw(st.sampled_from(fitting))
        data["kv"] = kv
        data["extra_kv"] = draw(st.sampled_from(["none", kv])) if kv == "v4" else "none"
    if draw(st.booleans()):
        data["topk"] = draw(st.integers(1, 1 << 20))
    if data.get("extra_kv") not in (None, "none"):
        data["extra_kv"] = {"format": data["extra_kv"], "topk": 7}
    if data["ops"] in (["indexer_logits"], ["index_cache"]):
        data["index"] = {
            "heads": 8 * draw(st.integers(1, 16)),
            "dim": draw(st.sampled_from([32, 64, 128])),
            "keys": "fp8",
        }
    return data


@given(spec_mappings())
def test_specs_round_trip(data):
    spec = load_spec(data)
    assert parse_spec(spec.to_yaml()) == spec
    assert parse_spec(spec.to_json()) == spec
    assert spec.replace(heads=spec.heads) == spec


def test_replace_validates():
    spec = load_spec("v32_h16")
    assert spec.replace(archs=["sm_80"]).archs == ("sm_80",)
    with pytest.raises(SpecError, match="heads = 0"):
        spec.replace(heads=0)


def test_a_spec_is_frozen():
    spec = load_spec("v32_h16")
    with pytest.raises(ValueError, match="frozen"):
        spec.heads = 8


@pytest.mark.parametrize("text", ["v32_h16", "v32_h16.yaml", "specs/v32_h16.yaml", "specs/v32_h16"])
def test_shipped_names_resolve_from_any_folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_spec_path(text) == shipped_spec_folder() / "v32_h16.yaml"


def test_a_file_wins_over_a_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("specs").mkdir()
    Path("specs/v32_h16.yaml").write_text(BASE_YAML.replace("16", "24"))
    assert load_spec("specs/v32_h16.yaml").heads == 24
    assert load_spec("v32_h16").heads == 16


def test_packaged_specs_are_used_when_installed(tmp_path, monkeypatch):
    package = tmp_path / "dsagen"
    (package / "_data" / "specs").mkdir(parents=True)
    (package / "_data" / "specs" / "only.yaml").write_text(BASE_YAML)
    monkeypatch.setattr(spec_source, "__file__", str(package / "spec_source.py"))
    assert list(shipped_specs()) == ["only"]
    assert resolve_spec_path("only").parent == package / "_data" / "specs"


def test_file_names_that_are_no_spec_names_are_not_used(tmp_path):
    path = tmp_path / "my deployment.yaml"
    path.write_text(BASE_YAML)
    assert load_spec(path).name == "v32_h16"
    path = tmp_path / "tp8-h16.yaml"
    path.write_text(BASE_YAML)
    assert load_spec(path).name == "tp8-h16"


def test_paths_that_are_no_specs(tmp_path):
    with pytest.raises(SpecError, match=r"did you mean v32_h64\?.*shipped specs are .*v32_bf16_h128"):
        load_spec("v32_h61")
    (tmp_path / "tp8.yaml").write_text(BASE_YAML)
    with pytest.raises(SpecError, match=r"no such file \(did you mean tp8\.yaml\?\)"):
        load_spec(tmp_path / "tp9.yaml")
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="not a path"):
        load_spec("")
    with pytest.raises(SpecError, match="no such file"):
        load_spec("../specs/../v32_h16.yaml")
    (tmp_path / "a.txt").write_text(BASE_YAML)
    with pytest.raises(SpecError, match=r"ends in \.yaml"):
        load_spec(tmp_path / "a.txt")
    (tmp_path / "b.yaml").write_bytes(b"model: \xff")
    with pytest.raises(SpecError, match="byte 7 is not UTF-8"):
        load_spec(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("#" * (spec_source.MAX_SPEC_BYTES + 1))
    with pytest.raises(SpecError, match="larger than the 65536 bytes"):
        load_spec(tmp_path / "c.yaml")
    with pytest.raises(SpecError, match="expected a path, a mapping or a DeploymentSpec, found int"):
        load_spec(7)
    with pytest.raises(SpecError, match="keys must be text, found 1 of type int"):
        load_spec({1: 2})


def test_an_unreadable_file_says_so(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text(BASE_YAML)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SpecError, match=r"a\.yaml: cannot be read: Permission denied"):
        load_spec(path)


# --- YAML that is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: empty"),
        ("# nothing\n", "f.yaml: empty"),
        ("- a\n", "f.yaml:1: the top level is a list"),
        ("\nv32\n", "f.yaml:2: the top level is the value 'v32'"),
        (BASE_YAML + "heads: 8\n", "f.yaml:5: duplicate key 'heads', first set in line 2"),
        (BASE_YAML + "lse: {base: 2, base: 2}\n", "f.yaml:5: duplicate key 'lse.base', first set in line 5"),
        (BASE_YAML + "kv: !!python/object/apply:os.system [ls]\n", "f.yaml:5: YAML tag"),
        (BASE_YAML + "kv: !!str v32\n", "f.yaml:5: YAML tag"),
        (BASE_YAML + "kv: !include x\n", "f.yaml:5: YAML tag '!include' is not allowed"),
        (BASE_YAML + "kv: ! v32\n", "f.yaml:5: YAML tag"),
        (BASE_YAML + "kv: &a v32\n", "f.yaml:5: YAML anchors and aliases are not allowed"),
        ("a: &a [x]\nb: [*a, *a]\n", "f.yaml:1: YAML anchors and aliases are not allowed"),
        ("b: *a\n", "f.yaml:1: YAML anchors and aliases are not allowed"),
        (BASE_YAML + "<<: {kv: v32}\n", "f.yaml:5: <<: unknown key"),
        (BASE_YAML + "---\nmodel: v4\n", "f.yaml:5: a second YAML document begins"),
        (BASE_YAML + "? [a]\n: b\n", "f.yaml:5: a key must be a word"),
        (BASE_YAML + "1: b\n", "f.yaml:5: a key must be a word, found '1'"),
        (BASE_YAML + "null: b\n", "f.yaml:5: a key must be a word"),
        (BASE_YAML + "kv: " + "[" * 20000, "f.yaml:5: nested deeper than 8 levels"),
        (BASE_YAML + "kv: [\n", "f.yaml:6: not valid YAML"),
        (BASE_YAML + "kv: 'v32\n", "f.yaml:6: not valid YAML"),
        (BASE_YAML + "\tkv: v32\n", "f.yaml:5: not valid YAML"),
        ("a: \0\n", "f.yaml: not valid YAML"),
        ("a: b\n" * 20000, "f.yaml: larger than the 65536 bytes"),
    ],
)
def test_yaml_is_refused_with_its_line(text, message):
    assert refusal(text).startswith(message)


def test_nothing_is_ever_constructed_from_a_tag(tmp_path):
    target = tmp_path / "made"
    refusal(BASE_YAML + f"kv: !!python/object/apply:os.mkdir ['{target}']\n")
    assert not target.exists()


@given(st.text(max_size=200))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        parse_spec(text)
    except SpecError as error:
        assert str(error)


@given(st.dictionaries(st.sampled_from(["model", "heads", "archs", "ops", "kv", "extra_kv", "topk", "dims", "lse", "x"]),
                       st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(
                           ["v32", "v41", "none", "sm_90a", "sparse_decode", "bf16", "page_split", ""]),
                           lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
                               ["format", "layout", "scale", "topk", "d_qk", "base"]), inner, max_size=3),
                           max_leaves=4)))  # fmt: skip
def test_any_mapping_is_a_spec_or_a_spec_error(data):
    try:
        spec = load_spec({**BASE, **data})
    except SpecError as error:
        assert "spec: " in str(error)
    else:
        assert parse_spec(spec.to_yaml()) == spec


# --- fields that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "f.yaml: model: is missing: choose one of v32, v4, v41"),
        ({"model": "v33"}, "f.yaml:1: model = 'v33': unknown model 'v33' (did you mean v32?): known are v32"),
        ({"model": ["v32"]}, "f.yaml:1: model = ['v32']: unknown model"),
        ({"heads": None}, "f.yaml: heads: is missing: must be an integer of 1 .. 128"),
        ({"heads": 0}, "f.yaml:2: heads = 0: is not allowed: must be an integer of 1 .. 128 (query heads on this rank); the nearest is 1"),
        ({"heads": 129}, "f.yaml:2: heads = 129: is not allowed: must be an integer of 1 .. 128 (query heads on this rank); the nearest is 128"),
        ({"heads": "16"}, "f.yaml:2: heads = '16': is not allowed: must be an integer"),
        ({"heads": 16.0}, "f.yaml:2: heads = 16.0: is not allowed: must be an integer"),
        ({"heads": True}, "f.yaml:2: heads = True: is not allowed: must be an integer"),
        ({"archs": "sm_90a"}, "f.yaml:3: archs = 'sm_90a': must be a list: write [sm_90a]"),
        ({"archs": {"a": 1}}, "f.yaml:3: archs = {'a': 1}: must be a list of names"),
        ({"archs": []}, "f.yaml:3: archs = []: must list at least one"),
        ({"archs": ["sm_80", "sm_90"]}, "f.yaml:5: archs[1] = 'sm_90': arch 'sm_90' lacks its suffix"),
        ({"archs": [90]}, "f.yaml:4: archs[0] = 90: unknown arch 90"),
        ({"archs": ["sm_90a", "9.0a"]}, "f.yaml:5: archs[1] = '9.0a': is listed twice (both mean sm_90a)"),
        ({"ops": ["sparse_decoed"]}, "f.yaml:6: ops[0] = 'sparse_decoed': is no op (did you mean sparse_decode?)"),
        ({"ops": ["sparse_decode"] * 2}, "f.yaml:7: ops[1] = 'sparse_decode': is listed twice"),
        ({"ops": None}, "f.yaml: ops: is missing: allowed are index_cache, indexer_logits, kv_cache, sparse_decode, topk"),
        ({"archs": None}, "f.yaml: archs: is missing: allowed are sm_80, sm_86, sm_89, sm_90a"),
        ({"ops": []}, "f.yaml:5: ops = []: must list at least one: allowed are index_cache, indexer_logits, kv_cache, sparse_decode, topk"),
        ({"h_kv": 8}, "f.yaml:7: h_kv: is no key here: the KV heads of this rank are `kv_heads`, 1 unless given"),
        ({"num_key_value_heads": 1}, "f.yaml:7: num_key_value_heads: is no key here: the KV heads of this rank are"),
        ({"kv_heads": 8}, "f.yaml:7: kv_heads = 8: model v32 has one KV head, whose rows serve all query heads"),
        ({"kv_heads": 0}, "f.yaml:7: kv_heads = 0: is not allowed: must be an integer of 1 .. 128 (KV heads on this rank)"),
        ({"lse": {"base": 2.0}}, "f.yaml:8: lse.base = 2.0: is not allowed: must be 'e' or 2"),
        ({"lse": {"empty": "inf"}}, "f.yaml:8: lse.empty = 'inf': is not allowed: must be '+inf' or '-inf' (did you mean +inf?)"),
        ({"lse": {"empty": ".inf"}}, "f.yaml:8: lse.empty = '.inf': is not allowed: must be '+inf' or '-inf' (did you mean +inf?)"),
        ({"lse": {"empty": "-Infinity"}}, "f.yaml:8: lse.empty = '-Infinity': is not allowed: must be '+inf' or '-inf' (did you mean -inf?)"),
        ({"topk": 0}, "f.yaml:7: topk = 0: is not allowed: must be an integer of 1 .. 1048576 (columns of the index row); the nearest is 1"),
        ({"topk": -5}, "f.yaml:7: topk = -5: is not allowed"),
        ({"topk": 2.5}, "f.yaml:7: topk = 2.5: is not allowed"),
        ({"kv": "v33"}, "f.yaml:7: kv.format = 'v33': unknown KV format 'v33' (did you mean v32?): known are v32, v32_nope"),
        ({"kv": {"format": "v32", "layout": "page_split"}}, "f.yaml:9: kv.layout = 'page_split': KV format 'v32' has no layout 'page_split': it has interleaved"),
        ({"kv": {"scale": "ue8m0"}}, "f.yaml:8: kv.scale = 'ue8m0': KV format 'v32' has no scale 'ue8m0': it has fp32, fp32_pow2"),
        ({"kv": {"formt": "v32"}}, "f.yaml:8: kv.formt: unknown key (did you mean format?): allowed are format, layout, scale"),
        ({"kv": {"page_size": 64}}, "f.yaml:8: kv.page_size: is decided at run time"),
        ({"kv": ["v32"]}, "f.yaml:7: kv = ['v32']: must be a mapping with the keys format, layout, scale"),
        ({"kv": "v4"}, "f.yaml:7: kv.format = 'v4': holds rows of 512 dims where d_qk is 576: allowed are v32, v32_pow2, bf16"),
        ({"model": "v4", "kv": "v32"}, "f.yaml:7: kv.format = 'v32': holds rows of 576 dims where d_qk is 512"),
        ({"extra_kv": {"topk": 512}}, "f.yaml:7: extra_kv.format: is missing: choose one of"),
        ({"extra_kv": "v32"}, "f.yaml:7: extra_kv.topk: is missing: the second cache has its own capacity"),
        ({"extra_kv": {"format": "v32", "topk": 0}}, "f.yaml:9: extra_kv.topk = 0: is not allowed: must be an integer"),
        ({"extra_kv": {"format": "bf16", "topk": 8}}, "f.yaml:8: extra_kv.format = 'bf16': format bf16 cannot be a second cache beside v32: allowed is v32, or extra_kv: none"),
        ({"extra_topk": 512}, "f.yaml:7: extra_topk: unknown key"),
        ({"dims": {"d_qk": 512}}, "f.yaml:8: dims.d_qk = 512: model v32 has d_qk 576; others need model: custom"),
        ({"model": "custom", "topk": 64}, "f.yaml: kv: is missing: name a KV format"),
        ({"model": "custom", "kv": "v32"}, "f.yaml: topk: is missing: model custom has no default capacity"),
        ({"model": "custom", "kv": "v32", "topk": 64, "dims": {"d_v": 600}}, "f.yaml:10: dims.d_v = 600: must not exceed d_qk 576"),
        ({"model": "custom", "kv": "v32", "topk": 64, "dims": {"d_v": 64}}, "f.yaml:10: dims.d_v = 64: format v32 holds d_v 512"),
        ({"model": "custom", "kv": "v32", "topk": 64, "dims": {"d_qk": 192}}, "f.yaml:7: kv.format = 'v32': holds rows of 576 dims where d_qk is 192, for which no format exists"),
        ({"dims": 5}, "f.yaml:7: dims = 5: must be a mapping with the keys d_qk, d_v"),
        ({"lse": {"base": 10}}, "f.yaml:8: lse.base = 10: is not allowed: must be 'e' or 2"),
        ({"lse": {"empty": "+infinity"}}, "f.yaml:8: lse.empty = '+infinity': is not allowed: must be '+inf' or '-inf' (did you mean +inf?)"),
        ({"determinism": "batch-invariant"}, "f.yaml:7: determinism = 'batch-invariant': is not allowed: must be 'off' or 'batch_invariant' (did you mean batch_invariant?)"),
        ({"determinsm": "off"}, "f.yaml:7: determinsm: unknown key (did you mean determinism?): allowed are name, model, heads"),
        ({"page_size": 64}, "f.yaml:7: page_size: is decided at run time and needs no kernel of its own: leave it out"),
    ],
)  # fmt: skip
def test_field_is_refused_with_all_that_helps(changes, message):
    assert refusal(changed(**changes)).startswith(message)


def test_every_problem_is_reported_at_once():
    lines = refusal("model: v32\nheads: 0\narchs: sm_90\nops: [x]\ndeterminism: on\nfoo: 1\n").splitlines()
    assert [line.split(" ")[0] for line in lines] == [f"f.yaml:{n}:" for n in (2, 3, 4, 5, 6)]


def test_a_number_too_long_to_print_is_still_refused():
    with pytest.raises(
        SpecError, match="heads: is an integer of 16610 bits: no number in a spec has more than 18 digits"
    ):
        load_spec({**BASE, "heads": 10**5000})


def test_keywords_are_checked_like_files():
    with pytest.raises(InvalidSpecError, match="spec: heads = 0: is not allowed") as caught:
        DeploymentSpec(**{**BASE, "heads": 0})
    assert [problem.path for problem in caught.value.problems] == [("heads",)]
    assert DeploymentSpec(**BASE).name == "v32_h16"


HOSTILE = [
    'x"); asm volatile("trap;"); //', "<% for x in y %>", "${ 7*7 }", "{{7*7}}", "<# #>", "__global__ void f(){}",
    "a\n#include <b>", "../../etc/passwd", "a/b", "v32\\", "*/", "'; DROP", "a" * 65, "", "ä", "-x", ".x",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "place",
    [
        lambda t: {"name": t}, lambda t: {"model": t}, lambda t: {"archs": [t]}, lambda t: {"ops": [t]}, lambda t: {"kv": t},
        lambda t: {"kv": {"layout": t}}, lambda t: {"kv": {"scale": t}}, lambda t: {"extra_kv": {"format": t, "topk": 1}},
        lambda t: {"determinism": t}, lambda t: {"lse": {"base": t}}, lambda t: {"lse": {"empty": t}}, lambda t: {"heads": t},
        lambda t: {"topk": t}, lambda t: {t: 1},
    ],
)  # fmt: skip
def test_code_and_template_syntax_never_gets_into_a_spec(place, text):
    """Every text of a valid spec is a name from a closed list, except `name`, whose pattern has no room for syntax."""
    with pytest.raises(InvalidSpecError) as caught:
        load_spec({**BASE, **place(text)})
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


# --- schema ----------------------------------------------------------------------------------------------------------


def test_schema_lists_every_key_and_asks_for_four():
    schema = json_schema()
    assert set(schema["properties"]) == set(DeploymentSpec.model_fields)
    assert schema["required"] == ["model", "heads", "archs", "ops"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["archs"]["items"]["enum"] == list(ARCHS)
    assert schema["properties"]["ops"]["items"]["enum"] == list(known_ops())
    assert "required" not in schema["$defs"]["KvSpec"]
    assert json.loads(json.dumps(schema)) == schema


def test_ops_are_the_families():
    assert "sparse_decode" in known_ops()


# --- the dtype of scores, which one op reads -------------------------------------------------------------------------


def test_scores_are_fp32_where_topk_reads_them_and_absent_elsewhere():
    assert parse_spec(BASE_YAML).scores is None
    assert "scores" not in parse_spec(BASE_YAML).to_mapping()
    spec = parse_spec(changed(ops=["sparse_decode", "topk"]))
    assert (spec.scores, spec.to_mapping()["scores"]) == ("fp32", "fp32")
    assert parse_spec(changed(ops=["topk"], scores="bf16")).scores == "bf16"
    for round_trip in (spec.to_yaml(), spec.to_json()):
        assert parse_spec(round_trip) == spec


def test_scores_that_nothing_reads_are_an_error():
    text = "f.yaml:5: scores = 'fp32': nothing reads it: add topk or indexer_logits to ops, or leave it out"
    assert refusal(BASE_YAML + "scores: fp32\n") == text
    with pytest.raises(SpecError, match="scores = 'bf16': nothing reads it"):
        parse_spec(changed(ops=["topk"], scores="bf16")).replace(ops=["sparse_decode"])


def test_scores_of_another_dtype_are_named_with_what_is_allowed():
    text = refusal(changed(ops=["topk"], scores="fp16"))
    assert text == "f.yaml:7: scores = 'fp16': is not allowed: must be 'fp32' or 'bf16' (did you mean bf16?)"


def test_topk_selects_for_the_second_cache_where_there_is_one():
    assert load_spec("v41_h128").selected_topk == 512
    assert load_spec("v32_h128").selected_topk == 2048


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("016", "<spec>:2: heads = '016': is not allowed: must be an integer of 1 .. 128 (query heads on this rank): write 16"),
        ("'16'", "<spec>:2: heads = '16': is not allowed: must be an integer of 1 .. 128 (query heads on this rank): write 16"),
        ("0x10", "<spec>:2: heads = '0x10': is not allowed: must be an integer of 1 .. 128 (query heads on this rank)"),
        ("16.0", "<spec>:2: heads = 16.0: is not allowed: must be an integer of 1 .. 128 (query heads on this rank)"),
    ],
)  # fmt: skip
def test_a_head_count_is_shown_as_it_was_written(written, message):
    with pytest.raises(SpecError) as caught:
        parse_spec(f"model: v32\nheads: {written}\narchs: [sm_90a]\nops: [sparse_decode]\n")
    assert str(caught.value) == message


def test_an_infinity_of_python_is_taken_for_the_one_of_its_sign():
    for value, meant in ((float("inf"), "+inf"), (float("-inf"), "-inf")):
        with pytest.raises(SpecError, match=rf"lse\.empty = .*\(did you mean \{meant}\?\)"):
            DeploymentSpec(model="v32", heads=16, archs=["sm_90a"], ops=["sparse_decode"], lse={"empty": value})
