"""The smoke tier: what nvcc makes of the kernels. The build itself refuses spills and lost-performance messages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from dsagen.arch import ARCHS
from dsagen.build import Store, Toolchain, build_units, find_toolchain
from dsagen.dependent import is_dependent
from dsagen.emulator import coverage
from dsagen.errors import BuildError
from dsagen.families.indexer_logits import FAMILY as INDEXER_LOGITS
from dsagen.families.indexer_logits.geometry import DIMS
from dsagen.families.kv_cache import family as kv_cache
from dsagen.families.kv_cache.family import cache_axes
from dsagen.families.kv_cache.geometry import ROW_TYPES
from dsagen.families.sparse_decode import family as decode
from dsagen.families.sparse_decode import hopper
from dsagen.families.sparse_decode.geometry import fitting_geometry
from dsagen.families.sparse_decode.rows import Caches
from dsagen.index_format import INDEX_FORMATS
from dsagen.index_rule import default_index_rule, index_rules_of
from dsagen.kv_format import KV_FORMATS
from dsagen.kv_rule import default_rule, rules_of
from dsagen.matrix import expand
from dsagen.plan import KernelPlan, Variant
from dsagen.render import RenderedUnit, render
from dsagen.spec import load_spec

# Of what is compiled here, other tests look at the PTX.
pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("common_store")]

FORMAT_SPECS = ("v32_h16", "v32_bf16_h128")


def plans_of(spec_name: str, arch: str, heads: int) -> tuple[KernelPlan, ...]:
    matrix = expand(load_spec(spec_name).replace(archs=[arch], heads=heads))
    matrix.require_complete()
    return matrix.plans()


def every_plan(spec_name: str, arch: str) -> tuple[KernelPlan, ...]:
    """Every kernel that some head count of a spec gives on an arch: all its head counts in a CTA, in the body that is
    taken and in the portable one, and the combine.
    """
    plans = {}
    for body in ("", decode.BODY):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
            plans |= {plan.slug: plan for heads in range(1, 129) for plan in plans_of(spec_name, arch, heads)}
    return tuple(plans.values())


def toolchain_for(arch: str) -> Toolchain:
    return find_toolchain({arch: ARCHS[arch].min_cuda})


@pytest.mark.parametrize("spec_name", FORMAT_SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_as_planned(arch: str, spec_name: str) -> None:
    require_as_planned(every_plan(spec_name, arch), arch)


# Every other encoding, placement and pair of caches, and rows of other widths.
CACHES: tuple[tuple[str, str | None], ...] = (
    ("v32_nope", None),
    ("v4", None),
    ("v41_interleaved", None),
    ("v41_page_split", None),
    ("v41_fp4_interleaved", None),
    ("v41_fp4_page_split", None),
    ("fp16", None),
    ("bf16_d512", None),
    ("bf16_split", None),
    ("bf16_d192_v128", None),
    ("fp16_d448_v384", None),
    ("v32", "v32"),
    ("v4", "v4"),
    ("bf16", "bf16"),
    ("v41_interleaved", "v41_fp4_interleaved"),
    ("v41_page_split", "v41_fp4_page_split"),
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("formats", CACHES, ids=lambda formats: "-".join(filter(None, formats)))
def test_kernels_of_every_format_compile_as_planned(
    arch: str, formats: tuple[str, str | None], request: pytest.FixtureRequest
) -> None:
    """Each format on sm_90a and on every third arch in turn, with head counts in turn; --all-mutants takes all."""
    turn = CACHES.index(formats) + list(ARCHS).index(arch)
    everything = request.config.getoption("--all-mutants")
    if not everything and arch != "sm_90a" and turn % 3:
        pytest.skip("this format has its turn on other archs; --all-mutants takes all")
    found = decode.caches_of(*formats)
    assert isinstance(found, Caches)
    counts = [n for n in range(8, 65, 8) if fitting_geometry(found, n, ARCHS[arch]) is not None]
    assert counts
    if not everything:
        counts = [counts[-1] if turn % 2 == 0 else counts[turn % len(counts)]]
    plans = [
        decode.plan_main(Variant(decode.NAME, "main", decode.BODY, arch, decode.main_axes(found, heads_n, ARCHS[arch])))
        for heads_n in counts
    ]
    require_as_planned(tuple(plans), arch)


# Of several KV heads: rows alone, with a part elsewhere, of two formats; the most heads and the fewest.
KV_HEADS: tuple[tuple[str, str | None, int], ...] = (
    ("v32", None, 64),
    ("v4", "v4", 64),
    ("v41_interleaved", "v41_fp4_interleaved", 64),
    ("v41_page_split", "v41_fp4_page_split", 8),
    ("bf16_kv_d128_v128", None, 8),
    ("fp16_kv_d192_v256", "fp16_kv_d192_v256", 64),
    ("bf16_split", None, 32),
)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_several_kv_heads_compile_as_planned(arch: str, request: pytest.FixtureRequest) -> None:
    """Each on one arch in six, in turn; --all-mutants takes all."""
    everything, plans = request.config.getoption("--all-mutants"), []
    for turn, (main, extra, most) in enumerate(KV_HEADS, list(ARCHS).index(arch)):
        if turn % 6 and not everything:
            continue
        found = decode.caches_of(main, extra)
        assert isinstance(found, Caches)
        heads_n = next(n for n in range(most, 0, -8) if fitting_geometry(found, n, ARCHS[arch]) is not None)
        axes = decode.main_axes(found, heads_n, ARCHS[arch], several_kv_heads=True)
        plans.append(decode.plan_main(Variant(decode.NAME, "main", decode.BODY, arch, axes)))
    require_as_planned(tuple(plans), arch)


@pytest.mark.parametrize("formats", CACHES, ids=lambda formats: "-".join(filter(None, formats)))
def test_the_hopper_body_compiles_as_planned(formats: tuple[str, str | None], request: pytest.FixtureRequest) -> None:
    """Every third format with one head count in turn; --all-mutants takes all of both."""
    turn, arch = CACHES.index(formats), ARCHS["sm_90a"]
    everything = request.config.getoption("--all-mutants")
    if not everything and turn % 3 != 2:
        pytest.skip("this format has no turn; --all-mutants takes all")
    found = decode.caches_of(*formats)
    assert isinstance(found, Caches)
    counts = [n for n in range(8, hopper.MAX_HEADS + 1, 8) if hopper.takes(found, n, arch)]
    assert counts or found.d_v != 512
    variants = [
        Variant(decode.NAME, "main", hopper.BODY, arch.name, decode.main_axes(found, heads_n, arch))
        for heads_n in (counts if everything else counts[turn % 4 : turn % 4 + 1])
    ]
    require_as_planned(tuple(decode.plan_main(variant) for variant in variants), arch.name)


@pytest.mark.parametrize("scores", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_topk_compiles_as_planned(arch: str, scores: str) -> None:
    plans = expand(load_spec("v32_h16").replace(archs=[arch], ops=["topk"], scores=scores)).plans()
    assert {plan.variant.kernel for plan in plans} == {"main", "count", "select"}
    require_as_planned(plans, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_the_indexer_compiles_as_planned(arch: str) -> None:
    """Each width of keys, one of them with scores of both dtypes; of other formats and forms one each, by turns."""
    shapes = ((32, "fp32"), (64, "bf16"), (128, "fp32"), (128, "bf16"))
    plans = []
    for dim, scores in shapes:
        changes = {"archs": [arch], "scores": scores, "index": {"heads": 64, "dim": dim, "keys": "fp8"}}
        plans += expand(load_spec("v32_indexer_h128").replace(**changes)).plans()
    turn = list(ARCHS).index(arch)
    index = {"heads": 64, "dim": (128, 64, 32)[turn // 2 % 3], "keys": ("mxfp8", "mxfp4")[turn % 2]}
    plans += expand(load_spec("v32_indexer_h128").replace(archs=[arch], index=index)).plans()
    # On every third arch scores that are counted.
    if turn % 3 == 0:
        counted = load_spec("v32_decode_histogram_h16").replace(archs=[arch], index={**index, "histogram": True})
        plans += [plan for plan in expand(counted).plans() if plan.variant.kernel == "counted"]
    # Of keys in one piece those of a format, by turns as well, and on every fourth arch of candidate blocks, or with
    # their scores.
    forms = (["ragged", "candidates"], ["ragged", "blocks"], ["ragged"], ["ragged"])[turn % 4]
    ragged = {**index, "keys": list(INDEX_FORMATS)[turn % 3], "dim": 128, "forms": forms}
    plans += expand(load_spec("v32_indexer_h128").replace(archs=[arch], index=ragged)).plans()
    require_as_planned(tuple(plans), arch)


# Role and format, dims, heads and scores of the indexer's hopper body; tests of the emulator build more.
HOPPER_SHAPES = {
    ("main", "fp8"): ((128, 64, "fp32"), (128, 128, "bf16"), (64, 88, "fp32"), (32, 8, "bf16")),
    ("main", "mxfp8"): ((128, 64, "fp32"),),
    ("main", "mxfp4"): ((128, 40, "bf16"),),
    ("ragged", "fp8"): ((128, 64, "fp32"),),
    ("blocks", "fp8"): ((128, 120, "fp32"),),
    ("blocks", "mxfp4"): ((128, 32, "fp32"),),
    ("counted", "fp8"): ((128, 64, "fp32"), (64, 88, "bf16")),
    ("counted", "mxfp4"): ((128, 40, "fp32"),),
}


@pytest.mark.parametrize(("role", "keys"), HOPPER_SHAPES)
def test_the_indexer_s_hopper_body_compiles_as_planned(role: str, keys: str, request: pytest.FixtureRequest) -> None:
    """Each width of keys with head counts in turn; --all-mutants takes all, with scores of both dtypes."""
    shapes: Iterable[tuple[int, int, str]] = HOPPER_SHAPES[role, keys]
    if request.config.getoption("--all-mutants"):
        shapes = [(dim, heads, scores) for dim in DIMS for heads in range(8, 129, 8) for scores in ("fp32", "bf16")]
    plans = []
    for dim, heads, scores in shapes:
        smem = ARCHS["sm_90a"].smem_class
        axes = (("keys", keys), ("dim", dim), ("heads", heads), ("score", scores), ("smem", smem))
        plans.append(INDEXER_LOGITS.plan(Variant("indexer_logits", role, "hopper", "sm_90a", axes)))
    require_as_planned(tuple(plans), "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_the_caches_compiles_as_planned(arch: str) -> None:
    """Each format by its default rule; one of each structure from rows of every dtype, and one by every rule."""
    plans = {}
    for record in KV_FORMATS.values():
        choices = {(default_rule(record), "bf16")}
        if record.format_id in ("v32", "v41_fp4_interleaved", "bf16_split"):
            choices |= {(default_rule(record), rows) for rows in ROW_TYPES}
        if record.format_id == "v32":
            choices |= {(rule, "bf16") for rule in rules_of(record)}
        for rule, rows in choices:
            for role, axes in cache_axes(record, rule, rows):
                plan = kv_cache.FAMILY.plan(Variant("kv_cache", role, kv_cache.BODY, arch, axes))
                plans[plan.slug] = plan
    assert len(plans) > 40
    require_as_planned(tuple(plans.values()), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_the_index_cache_compiles_as_planned(arch: str, request: pytest.FixtureRequest) -> None:
    """Each format by every rule at 128 dims, by the default one at the others, and from rows of every dtype.

    Archs share half of them, and --all-mutants takes all on each.
    """
    plans = {}
    for keys, record in INDEX_FORMATS.items():
        choices = [(128, rule, "bf16") for rule in index_rules_of(record)]
        choices += [(dim, default_index_rule(record), "bf16") for dim in (32, 64)]
        choices += [(128, default_index_rule(record), rows) for rows in ("fp16", "fp32")]
        for dim, rule, rows in choices:
            index, write = {"heads": 64, "dim": dim, "keys": keys}, {"rows": rows, "rule": rule}
            spec = load_spec("v32_index_cache_h128").replace(archs=[arch], index=index, index_write=write)
            plans |= {plan.slug: plan for plan in expand(spec).plans()}
    assert len(plans) == 30
    turn, step = list(ARCHS).index(arch), 1 if request.config.getoption("--all-mutants") else 2 * len(ARCHS)
    require_as_planned(tuple(plans.values())[turn % step :: step], arch)


@pytest.mark.parametrize("arch", [name for name, row in ARCHS.items() if row.has_pdl])
def test_dependent_forms_compile_as_planned(arch: str, request: pytest.FixtureRequest) -> None:
    """By turns one of them on each arch, since their bodies are those of others; --all-mutants takes all."""
    names = ("v32_decode_h16", "v4_decode_h16", "v41_decode_h16")
    plans = {plan.slug: plan for name in names for plan in expand(load_spec(name).replace(archs=[arch])).plans()}
    dependent = tuple(plan for plan in plans.values() if is_dependent(plan.variant))
    turn, step = list(ARCHS).index(arch), 1 if request.config.getoption("--all-mutants") else len(dependent)
    require_as_planned(dependent[turn % step :: step], arch)


def require_as_planned(plans: tuple[KernelPlan, ...], arch: str) -> None:
    results = build_units([render(plan) for plan in plans], Store.open(), lambda: toolchain_for(arch))
    for plan, result in zip(plans, results, strict=True):
        report = result.entry.report
        assert report["registers"] <= plan.registers_cap
        assert report["registers"] == plan.registers_cap or not plan.moves_registers
        assert (report["spill_store_bytes"], report["spill_load_bytes"], report["stack_bytes"]) == (0, 0, 0)
        assert report["smem_static_bytes"] == 0
        assert report["performance_messages"] == []
        # What the emulator lacks, no machine without a GPU could prove.
        assert coverage(result.entry.ptx_path.read_text()) == {}


@pytest.mark.parametrize("spec_name", FORMAT_SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_count_up_to_the_largest_is_among_them(arch: str, spec_name: str) -> None:
    def is_main(plan: KernelPlan) -> bool:
        return (plan.variant.family, plan.variant.kernel) == (decode.NAME, "main")

    # Of either body: few heads have `hopper` where it is built.
    in_a_cta = {plan.variant.axis("n") for plan in every_plan(spec_name, arch) if is_main(plan)}
    assert sorted(in_a_cta) == list(range(8, max(in_a_cta) + 8, 8))
    for heads in (1, 24, 61, 128):
        (main,) = [plan for plan in plans_of(spec_name, arch, heads) if is_main(plan)]
        groups = math.ceil(heads / max(in_a_cta))
        assert main.variant.axis("n") == 8 * math.ceil(math.ceil(heads / groups) / 8)


@pytest.mark.parametrize("change", [-8, 8])
def test_a_kernel_that_moves_registers_is_held_to_exactly_what_was_planned(change: int) -> None:
    plan = plans_of("v32_h16", "sm_90a", 16)[0]
    unit = render(plan)
    other = replace(unit, plan={**unit.plan, "registers_cap": plan.registers_cap + change})
    with pytest.raises(BuildError, match=r"\[B-0[34]\] .* takes 96 registers a thread"):
        build_units([other], Store.open(), lambda: toolchain_for("sm_90a"))


@pytest.mark.parametrize(
    ("original", "changed", "guard_id"),
    [
        ("int kRowPitchBytes = 6", "int kRowPitchBytes = 16 + 6", "SD-05"),
        ("alignas(16) float shrink", "alignas(16) float inserted[4]; alignas(16) float shrink", "K-03"),
        ("  i32 s_q;", "  i32 inserted; i32 s_q;", "K-04"),
    ],
)
def test_a_unit_that_leaves_its_plan_does_not_compile(original: str, changed: str, guard_id: str) -> None:
    unit = render(plans_of("v32_h16", "sm_90a", 16)[0])
    assert unit.text.count(original) == 1
    broken: RenderedUnit = replace(unit, text=unit.text.replace(original, changed))
    with pytest.raises(BuildError, match=rf"\[{guard_id}\]"):
        build_units([broken], Store.open(), lambda: toolchain_for("sm_90a"))
