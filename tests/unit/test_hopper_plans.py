"""The hopper body of sparse decode: which rows and head counts it takes, and when it is asked for."""

import pytest

from dsagen import knobs
from dsagen.arch import ARCHS, arch
from dsagen.errors import KnobError
from dsagen.families.sparse_decode import family, hopper
from dsagen.families.sparse_decode.family import FAMILY, caches_of, main_axes, plan_main
from dsagen.families.sparse_decode.rows import Caches
from dsagen.plan import Variant
from dsagen.render import render
from dsagen.spec import load_spec

KNOB = "DSAGEN_SPARSE_DECODE_BODY"
HOPPER = arch("sm_90a")


def rows(fmt: str, extra: str | None = None) -> Caches:
    caches = caches_of(fmt, extra)
    assert isinstance(caches, Caches)
    return caches


def body_of(spec: str, arch_name: str = "sm_90a") -> str:
    main = FAMILY.expand(load_spec(spec), arch(arch_name))[0].variant
    assert main is not None
    return main.body


def test_the_knob_has_the_family_s_bodies():
    assert (family.BODY, hopper.BODY) == knobs.BODIES == tuple(family._BODIES)


def test_without_the_knob_nothing_changes():
    assert body_of("v32_h16") == "mma_sync"


@pytest.mark.parametrize(
    ("spec", "arch_name", "body"),
    [
        ("v32_h16", "sm_90a", "hopper"),
        ("v41_h32", "sm_90a", "hopper"),  # with FP4 rows in the second cache
        ("contest_attention_h16", "sm_90a", "hopper"),
        ("v32_h64", "sm_90a", "mma_sync"),  # too many heads
        ("v32_h16", "sm_100a", "mma_sync"),  # no such products
        ("v32_h16", "sm_80", "mma_sync"),
    ],
)
def test_the_knob_asks_for_it_where_it_is_built(monkeypatch, spec, arch_name, body):
    monkeypatch.setenv(KNOB, "hopper")
    assert body_of(spec, arch_name) == body


def test_the_knob_names_what_it_takes(monkeypatch):
    monkeypatch.setenv(KNOB, "hoper")
    with pytest.raises(KnobError, match=f"{KNOB}='hoper': expected one of mma_sync, hopper .did you mean 'hopper'"):
        body_of("v32_h16")


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
