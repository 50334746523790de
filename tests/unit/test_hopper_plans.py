"""The hopper body of sparse decode: which rows and head counts it takes, and when it is asked for."""

import pytest

from dsagen import knobs
from dsagen.arch import ARCHS, arch
from dsagen.errors import KnobError
from dsagen.families.sparse_decode import family, hopper
from dsagen.families.sparse_decode.choice_table import ChoiceRow
from dsagen.families.sparse_decode.family import FAMILY, caches_of, main_axes, plan_main
from dsagen.families.sparse_decode.rows import Caches
from dsagen.plan import Variant
from dsagen.render import render
from dsagen.spec import DeploymentSpec, load_spec

KNOB = "DSAGEN_SPARSE_DECODE_BODY"
HOPPER = arch("sm_90a")


def rows(fmt: str, extra: str | None = None) -> Caches:
    caches = caches_of(fmt, extra)
    assert isinstance(caches, Caches)
    return caches


def bodies_of(spec: str | DeploymentSpec, arch_name: str = "sm_90a") -> list[str]:
    """Bodies of the main kernels that a spec has, dependent forms included."""
    cells = FAMILY.expand(load_spec(spec), arch(arch_name))
    return [cell.variant.body for cell in cells if cell.variant is not None and cell.variant.kernel == "main"]


def test_the_knob_has_the_family_s_bodies():
    assert (family.BODY, hopper.BODY) == knobs.BODIES == tuple(family._BODIES)


TAKEN = pytest.mark.parametrize(
    ("spec", "arch_name", "body"),
    [
        ("v32_h16", "sm_90a", "hopper"),
        ("v32_h32", "sm_90a", "hopper"),
        ("v41_h32", "sm_90a", "hopper"),  # with FP4 rows in the second cache
        ("contest_attention_h16", "sm_90a", "hopper"),
        ("v32_h64", "sm_90a", "mma_sync"),  # too many heads
        ("v32_h16", "sm_100a", "mma_sync"),  # no such products
        ("v32_h16", "sm_80", "mma_sync"),
        ("gla_h64", "sm_90a", "mma_sync"),  # several KV heads
        ("v32_decode_h16", "sm_90a", "hopper"),
    ],
)


@TAKEN
@pytest.mark.parametrize("asked", ["", "hopper", "mma_sync"])
def test_it_is_taken_where_it_is_built_unless_the_knob_asks_for_the_other(monkeypatch, asked, spec, arch_name, body):
    monkeypatch.setenv(KNOB, asked)
    assert set(bodies_of(spec, arch_name)) == {asked if asked and body == "hopper" else body}


def test_batch_invariant_specs_have_it_too():
    assert bodies_of(load_spec("v32_h16").replace(determinism="batch_invariant")) == ["hopper"]


def test_each_choice_has_its_reason(monkeypatch, tmp_path):
    def reasons(arch_name="sm_90a"):
        return [cell.why for cell in FAMILY.expand(load_spec("v32_h16"), arch(arch_name)) if cell.role == "main"]

    assert reasons() == ["preferred to mma_sync"]
    assert reasons("sm_80") == [""]
    slug = Variant(family.NAME, "main", "mma_sync", "sm_90a", main_axes(rows("v32"), 16, HOPPER)).slug
    ranges = ((1, 1), (2048, 2048), (0, 0))
    row = ChoiceRow(slug, "text", "NVIDIA H200", "580", "nvcc 13", "2026-12-01T10:00:00Z", 16, *ranges, 32, 2, 9.5)
    table = tmp_path / "table.jsonl"
    table.write_text(row.to_line())
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", str(table))
    assert reasons() == ["preferred to mma_sync", "a choice table names it"]
    monkeypatch.setenv(KNOB, "mma_sync")
    assert reasons() == [f"{KNOB} asks for it"]


def test_shipped_tables_ask_for_one_body_of_each_spec(monkeypatch):
    """What they measured within noise of each other does not make a spec longer to build."""
    monkeypatch.delenv("DSAGEN_CHOICE_TABLE")
    for name in ("v32_h8", "v32_h16", "v32_h32", "v41_h16", "v41_fp8_h16", "v41_fp4_h16", "v32_decode_h16"):
        assert bodies_of(name) == ["hopper"]


def test_the_knob_names_what_it_takes(monkeypatch):
    monkeypatch.setenv(KNOB, "hoper")
    with pytest.raises(KnobError, match=f"{KNOB}='hoper': expected one of mma_sync, hopper .did you mean 'hopper'"):
        bodies_of("v32_h16")


@pytest.mark.parametrize("heads_n", [8, 16, 24, 32])
@pytest.mark.parametrize(
    ("fmt", "extra"),
    [
        ("v32", None),
        ("v4", "v4"),
        ("v41_page_split", "v41_fp4_page_split"),
        ("v41_fp4_interleaved", None),
        ("fp16", None),
    ],
)
def test_every_plan_fits(fmt, extra, heads_n):
    caches = rows(fmt, extra)
    assert hopper.takes(caches, heads_n, HOPPER)
    geometry = hopper.fitting_geometry(caches, heads_n, HOPPER)
    fields, size = hopper.smem_fields(caches, geometry)
    assert size <= HOPPER.smem_optin_bytes
    places = {field.name: field for field in fields}
    for name in ("query", "probability"):
        assert places[name].offset_bytes % 1024 == 0
    # A row of 64 dims or tokens is what the swizzle spans.
    assert places["query"].size_bytes == heads_n * caches.d_qk * 2
    assert places["probability"].size_bytes == 2 * caches.probability_copies * heads_n * 64 * 2


def test_what_it_does_not_take():
    assert not hopper.takes(rows("v32"), 40, HOPPER)
    assert not any(hopper.takes(rows("v32"), 16, row) for name, row in ARCHS.items() if name != "sm_90a")


def test_shared_memory_begins_where_the_swizzle_counts_from():
    axes = main_axes(rows("v32"), 16, HOPPER)
    text = render(plan_main(Variant(family.NAME, "main", "hopper", "sm_90a", axes))).text
    assert "extern __shared__ __align__(1024) u8 dynamic_smem[];" in text
    text = render(plan_main(Variant(family.NAME, "main", "mma_sync", "sm_90a", axes))).text
    assert "extern __shared__ __align__(128) u8 dynamic_smem[];" in text
