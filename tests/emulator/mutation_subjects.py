"""The kernels of all families that are mutated, and how each kind is run and held to its reference.

A family's new kernel comes in by itself, from the shipped specs; a new kind of kernel needs an entry in RUNNERS, a new
family with several of one kind perhaps an axis in _SIZES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import cache_rows
import decode
import index_rows
import indexer
import topk_rows as topk
import torch
from decode import Kernel
from index_rows import EmulatedIndexCache
from ptx_texts import ptx_of
from topk_rows import Scores

from dsagen.arch import arch as arch_row
from dsagen.check.cache import allocate_cache
from dsagen.check.candidate_cases import CandidateCase, Lists
from dsagen.check.cases import DecodeCase, ExtraCase, Values
from dsagen.check.index_cases import Action as IndexAction
from dsagen.check.index_cases import IndexCacheCase
from dsagen.check.indexer_cases import Lengths, LogitsCase
from dsagen.check.kv_cases import Contents
from dsagen.check.ragged_cases import RaggedCase
from dsagen.check.ragged_cases import Windows as RaggedWindows
from dsagen.dependent import is_dependent
from dsagen.errors import EmulatorError
from dsagen.families.indexer_logits import hopper as logits_hopper
from dsagen.families.indexer_logits.bodies import hopper_takes
from dsagen.families.indexer_logits.forms import BLOCKS, COUNTED, FORMS
from dsagen.families.kv_cache.reference import convert_reference, read_reference, write_reference
from dsagen.families.sparse_decode import family as decode_family
from dsagen.families.sparse_decode import hopper
from dsagen.families.topk.family import CLUSTER, COUNT, SELECT, split_variants
from dsagen.family import families, family_of_op
from dsagen.kv_format import kv_format
from dsagen.plan import Variant
from dsagen.spec import load_spec, shipped_specs

ARCHS = ("sm_90a", "sm_80")
# Axes that make a kernel larger and no different: the smallest that takes the cases below stands for all.
_SIZES = ("n", "smem", "threads")


# What the hopper body of sparse decode is tried on: each kind of scales, and two formats; and heads of the indexer's.
_WARPGROUP_ROWS = (
    ("v32", None),
    ("v41_interleaved", None),
    ("v41_fp4_interleaved", None),
    ("v41_interleaved", "v41_fp4_interleaved"),
)
_LOGITS_HEADS = 16


@dataclass(frozen=True)
class Attempt:
    """One way of running a kernel."""

    seed: int
    schedule: str


_PAGES, _PAGE = 3, 5
_ROW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Each takes other inputs, up to as many as a kind of kernel has.
_ATTEMPTS = (
    Attempt(0, "turns"), Attempt(1, "random"), Attempt(2, "priorities"), Attempt(3, "random"), Attempt(4, "turns"),
    Attempt(5, "random"), Attempt(6, "priorities"), Attempt(7, "turns"),
)  # fmt: skip
_USUAL_ATTEMPTS = 6
Runner = Callable[[Kernel, Attempt], str]


@cache
def variants() -> dict[str, Variant]:
    """Every kind of kernel of the shipped specs on the archs, by slug.

    Kernels of several KV heads are those of one behind other addresses, and nothing in them orders anything else.
    Nor do scores of candidate blocks beside the logits. What counts scores is one text for every arch and both bodies,
    which order it by the same barriers.
    Dependent forms are those by themselves behind a wait, which test_overlapping_steps.py takes away.
    """
    smallest: dict[tuple[object, ...], Variant] = {}
    for name in shipped_specs():
        spec = load_spec(name)
        # The others come below, of few rows and heads.
        with indexer.portable_bodies():
            cells = [
                cell for arch in ARCHS for op in spec.ops for cell in family_of_op(op).expand(spec, arch_row(arch))
            ]
        for variant in (cell.variant for cell in cells if cell.variant is not None and cell.kept):
            if "kvh" in dict(variant.axes) or is_dependent(variant) or variant.kernel == BLOCKS:
                continue
            if variant.kernel == COUNTED and variant.arch != ARCHS[0]:
                continue
            kind = (variant.family, variant.kernel, variant.body, variant.arch)
            key = (*kind, *(axis for axis in variant.axes if axis[0] not in _SIZES))
            old = smallest.get(key)
            if old is None or _sizes(variant) < _sizes(old):
                smallest[key] = variant
    found = list(smallest.values())
    return {variant.slug: variant for variant in (*found, *map(_with_warpgroups, filter(_shows_warpgroups, found)))}


def _shows_warpgroups(variant: Variant) -> bool:
    """Whether this is a kernel whose like with warpgroup products is tried, too: one and two formats of rows."""
    axes = dict(variant.axes)
    if variant.family == LogitsCase.op:
        # What becomes of codes orders nothing: one format of each kernel stands for all.
        return (
            variant.kernel != COUNTED
            and axes["keys"] == "fp8"
            and hopper_takes("fp8", FORMS[variant.kernel], arch_row(variant.arch))
        )
    pair = (axes.get("kv"), axes.get("xkv"))
    return variant.body == decode_family.BODY and variant.arch == "sm_90a" and pair in _WARPGROUP_ROWS


def _with_warpgroups(variant: Variant) -> Variant:
    axes = variant.axes
    if variant.family == LogitsCase.op:
        place = [name for name, _ in axes].index("score")
        axes = (*axes[:place], ("heads", _LOGITS_HEADS), *axes[place:])
    return replace(variant, body=hopper.BODY, axes=axes)


def _sizes(variant: Variant) -> list[int]:
    # A row that is held in shared memory needs the threads.
    return [-int(value) if name == "threads" else int(value) for name, value in variant.axes if name in _SIZES]


@cache
def kernel_of(slug: str) -> Kernel:
    """A kernel as the build compiles it."""
    variant = variants()[slug]
    plan = families()[variant.family].plan(variant)
    return Kernel(plan, ptx_of(plan))


def attempts_of(kernel: Kernel) -> list[Attempt]:
    """So many that every kind of input has its turn, and every schedule."""
    variant = kernel.plan.variant
    return list(_ATTEMPTS if variant.kernel == SELECT or variant.body == CLUSTER else _ATTEMPTS[:_USUAL_ATTEMPTS])


def outcome(kernel: Kernel, attempts: list[Attempt]) -> tuple[str, Attempt | None]:
    """The first complaint, of the machine or of the comparison, and the attempt that gave it; or nothing."""
    variant = kernel.plan.variant
    runner = RUNNERS[variant.family, variant.kernel]
    for attempt in attempts:
        try:
            found = runner(kernel, attempt)
        except EmulatorError as error:
            found = str(error)
        if found:
            return found, attempt
    return "", None


# Long enough that every ring goes round; ids of all kinds, and a last tile in which few warps have a token.
_CASE = DecodeCase("mutants", batch=1, s_q=1, kv_tokens=500, topk=458, page_size=61, wild_ids=True)
_EXTRA = ExtraCase(kv_tokens=300, topk=394, page_size=13)
# Logits that rise every 64 columns, so that the reference of the softmax does too, for the last time in that tile.
# And logits so far apart that it rises for some heads only.
_CASES = (replace(_CASE, values=Values.RAMP_UP), _CASE, replace(_CASE, values=Values.HUGE))


def _run_main(kernel: Kernel, attempt: Attempt) -> str:
    variant = kernel.plan.variant
    case, fmt, heads = _CASES[attempt.seed % len(_CASES)], str(variant.axis("kv")), variant.axis_int("n")
    extra = str(dict(variant.axes)["xkv"]) if "xkv" in dict(variant.axes) else None
    if extra is not None:
        case = replace(case, extra=_EXTRA)
    splits, joins = 1 + attempt.seed % 3 // 2, 1
    if variant.body == hopper.BODY:
        joins = (1, 8, 1, 2, 1, 4)[attempt.seed % 6]
    found = decode.run(
        case, fmt, heads, variant.arch, max(splits, joins), attempt.seed,
        main=kernel, schedule=attempt.schedule, extra=extra, joins=joins > 1,
    )  # fmt: skip
    return decode.problem(case, fmt, found, extra)


def _run_combine(kernel: Kernel, attempt: Attempt) -> str:
    variant = kernel.plan.variant
    case, d_v = replace(_CASES[attempt.seed % len(_CASES)], topk=150), variant.axis_int("dv")
    fmt = "v32" if d_v == 512 else f"bf16_d{d_v + 64}_v{d_v}"
    found = decode.run(
        case, fmt, 8, variant.arch, 2, attempt.seed, combine=kernel, schedule=attempt.schedule
    )  # fmt: skip
    return decode.problem(case, fmt, found)


def _run_select(kernel: Kernel, attempt: Attempt) -> str:
    variant = kernel.plan.variant
    score, resident = str(variant.axis("score")), variant.body == "row_resident"
    # Of so many elements on, a row's threshold is guessed.
    short = 9001 if score == "fp32" else 18_001
    calls = (
        Scores(topk.one_binade, short), Scores(topk.few_values), Scores(topk.normal, short, ordered=False),
        Scores(topk.equal), Scores(topk.mostly_dropped, drops=True), Scores(topk.normal, short),
    )  # fmt: skip
    if resident:
        # Rows of two batches, and blocks that take several.
        wide = 24_001 if score == "fp32" else 48_001
        calls = tuple(replace(call, ctas=1 + n % 2) for n, call in enumerate(calls))
        # Of so many that are wanted, the threshold is not guessed: the first digit's sweep is the first to await them.
        many = replace(calls[2], width=wide, k=7900)
        # And so many are more than the list of some archs has room for, so that another row is in no order, either.
        last = replace(calls[5], width=wide, ordered=False)
        calls = (*calls[:2], many, replace(calls[3], width=wide), calls[4], last)
    if variant.body == CLUSTER:
        # Of what a guess gives, in balanced lists, in a long one, with many equals, and in order; then lists that fit,
        # that fit after more digits, and that never do, of rows in several batches.
        wide = 41_001 if score == "fp32" else 82_001
        guessed = [
            Scores(values, wide, k=2048, ordered=False) for values in (topk.normal, topk.descending, topk.eighths)
        ]
        calls = (
            *guessed, replace(calls[3], width=26_001), Scores(topk.normal, wide, k=2048),
            replace(calls[1], ordered=False), replace(calls[4], width=wide, k=wide),
            Scores(topk.one_binade, wide, k=2048),
        )  # fmt: skip
        calls = tuple(replace(call, cluster=2 << n % 3) for n, call in enumerate(calls))
    call = topk.make_call(calls[attempt.seed % len(calls)], score)
    return topk.problem(call, kernel, attempt.seed, attempt.schedule)


def _run_shared_rows(kernel: Kernel, attempt: Attempt) -> str:
    """Rows that several blocks share, by two kernels of which this is one."""
    variant = kernel.plan.variant
    score = str(variant.axis("score"))
    pair = {v.kernel: topk.compiled(v) for v in split_variants(score, arch_row(variant.arch))}
    pair[variant.kernel] = kernel
    # So long that a part's threshold is guessed, and that of the parts' best.
    long = 41_001 if score == "fp32" else 82_001
    calls = (
        Scores(topk.equal), Scores(topk.few_values), Scores(topk.normal, ordered=False),
        Scores(topk.equal, 26_001, k=4096), Scores(topk.mostly_dropped, drops=True),
        Scores(topk.one_digit, long, k=2048, ordered=False, parts=5),
        # A part's guess that more reach than its list has room for.
        Scores(topk.mostly_top, 33_001, parts=2),
    )  # fmt: skip
    if score == "bf16":
        # Few that tie, in a part and among the parts' best.
        calls = (*calls, Scores(topk.thin_top, 41_001, k=200))
    call = topk.make_call(calls[attempt.seed % len(calls)], score)
    return topk.problem(call, pair[SELECT], attempt.seed, attempt.schedule, pair[COUNT])


def _run_caches(kernel: Kernel, attempt: Attempt) -> str:
    """One op of the caches, on each slot of a small pool."""
    variant = kernel.plan.variant
    record = kv_format(str(variant.axis("to" if variant.kernel == "convert" else "kv")))
    generator = torch.Generator().manual_seed(attempt.seed)
    slots = torch.randperm(_PAGES * _PAGE, generator=generator)
    found = allocate_cache(record, _PAGES, _PAGE, "cpu")
    wanted = cache_rows.copied(found)
    if variant.kernel == "read":
        for pool in found.values():
            pool.zero_()
        rows = cache_rows.read(kernel, record, found, len(slots), slots)
        return "" if rows.equal(read_reference(record, found, slots)) else "rows"
    if variant.kernel == "write":
        x = torch.randn(len(slots), record.d_qk, generator=generator).to(_ROW_DTYPES[str(variant.axis("rows"))])
        cache_rows.write(kernel, record, found, x, slots, seed=attempt.seed)
        write_reference(record, wanted, x, slots, str(variant.axis("rule")))
    else:
        source = allocate_cache(kv_format(str(variant.axis("from"))), _PAGES, _PAGE, "cpu")
        cache_rows.convert(kernel, source, found, (slots, slots.flip(0)))
        convert_reference(kv_format(str(variant.axis("from"))), source, record, wanted, slots, slots.flip(0))
    return "" if cache_rows.same_bytes(found, wanted) else "pool"


# Rings that go round, of the smallest keys too, and units of several tokens; then copies of words, and blocks that
# find their spans far in.
_LOGITS_CASES = (
    LogitsCase("mutants", 2, 3, 1500, page_size=61, pad_bytes=12, lengths=Lengths.PER_REQUEST),
    LogitsCase("mutants.words", 140, 1, 130, page_size=5, lengths=Lengths.BEYOND, fill=True),
    # A tile of few keys for each of three blocks.
    LogitsCase("mutants.few", 1, 3, 90, page_size=8, lengths=Lengths.WHOLE),
)
# Pages of whole warps' keys, which the hopper body has copies of its own for.
_PAGE_CASES = (
    LogitsCase("mutants.pages", 2, 3, 1500, page_size=64, pad_bytes=16, lengths=Lengths.PER_REQUEST, wild=True),
    LogitsCase("mutants.many_of_pages", 140, 1, 130, page_size=32, lengths=Lengths.BEYOND, fill=True),
    LogitsCase("mutants.few_of_pages", 1, 3, 90, page_size=32, lengths=Lengths.WHOLE),
)


_RAGGED_CASES = (
    RaggedCase("mutants", 13, 2600, windows=RaggedWindows.PROMPTS, key_gap=16),
    RaggedCase("mutants.words", 140, 130, 90, windows=RaggedWindows.BEYOND, fill=True, key_gap=4, heads=128),
)
# Of the hopper body, whose units have more tokens: several of them that its ring goes round in, too.
_HOPPER_RAGGED_CASES = (
    _RAGGED_CASES[0],
    RaggedCase("mutants.units", 70, 900, windows=RaggedWindows.WHOLE),
    replace(_RAGGED_CASES[1], heads=None),
)


_CANDIDATE_CASES = (
    CandidateCase("mutants", LogitsCase("", 2, 3, 1500, 61, 12, lengths=Lengths.PER_REQUEST), 190),
    CandidateCase("mutants.wild", LogitsCase("", 140, 1, 130, page_size=5, wild=True), 9, 16, Lists.WILD),
)


def _run_logits(kernel: Kernel, attempt: Attempt) -> str:
    variant = kernel.plan.variant
    axes = variant.arch, _LOGITS_HEADS, variant.axis_int("dim"), str(variant.axis("score")), str(variant.axis("keys"))
    if variant.kernel == "ragged":
        of_form = _HOPPER_RAGGED_CASES if variant.body == logits_hopper.BODY else _RAGGED_CASES
        case = of_form[attempt.seed % len(of_form)]
        spec = indexer.ragged_spec(variant.arch, case.heads or 16, *axes[2:])
        return indexer.ragged_problem(case, indexer.EmulatedRagged(spec, kernel, attempt.seed, attempt.schedule))
    if variant.kernel == "candidates":
        listed = indexer.candidates_spec(variant.arch, *axes[2:])
        subject_of_lists = indexer.EmulatedCandidates(listed, kernel, attempt.seed, attempt.schedule)
        return indexer.candidates_problem(_CANDIDATE_CASES[attempt.seed % 2], subject_of_lists)
    kind = indexer.EmulatedCounts if variant.kernel == COUNTED else indexer.EmulatedIndexer
    subject = kind(indexer.spec_of(*axes), kernel, attempt.seed, attempt.schedule)
    # Only the hopper body makes small tiles, and has two forms of copies.
    if variant.body != logits_hopper.BODY:
        return indexer.problem(_LOGITS_CASES[attempt.seed % 2], subject)
    cases = (_LOGITS_CASES[attempt.seed % len(_LOGITS_CASES)], _PAGE_CASES[attempt.seed % len(_PAGE_CASES)])
    return next(filter(None, (indexer.problem(case, subject) for case in cases)), "")


_INDEX_CASES = (
    IndexCacheCase("mutants.words", IndexAction.WRITE, 40, 11, 5, 4, contents=Contents.SPECIAL),
    IndexCacheCase("mutants", IndexAction.WRITE, 40, 4, 16, contents=Contents.TIES, spare_keys=3),
)


def _run_index_cache(kernel: Kernel, attempt: Attempt) -> str:
    """One op of the index cache, with pages that start at multiples of 4 and of 16 bytes in turn."""
    axes, variant = dict(kernel.plan.variant.axes), kernel.plan.variant
    rule, rows = str(axes.get("rule", "pow2_amax_floor")), str(axes.get("rows", "bf16"))
    spec = index_rows.spec_of(str(axes["keys"]), int(axes["dim"]), rule, rows, variant.arch)
    subject = EmulatedIndexCache(spec, {variant.kernel: kernel}, attempt.seed, attempt.schedule)
    case = _INDEX_CASES[attempt.seed % 2]
    return index_rows.problem(replace(case, action=IndexAction(variant.kernel)), subject, attempt.seed)


RUNNERS: dict[tuple[str, str], Runner] = {
    ("index_cache", "write"): _run_index_cache,
    ("index_cache", "gather"): _run_index_cache,
    ("sparse_decode", "main"): _run_main,
    ("sparse_decode", "combine"): _run_combine,
    ("indexer_logits", "main"): _run_logits,
    ("indexer_logits", COUNTED): _run_logits,
    ("indexer_logits", "ragged"): _run_logits,
    ("indexer_logits", "candidates"): _run_logits,
    ("kv_cache", "write"): _run_caches,
    ("kv_cache", "read"): _run_caches,
    ("kv_cache", "convert"): _run_caches,
    ("topk", "main"): _run_select,
    ("topk", COUNT): _run_shared_rows,
    ("topk", SELECT): _run_shared_rows,
}
