"""Decode steps whose scores are counted where they are made: what is launched, where counts go, when it is refused."""

from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins, take_registers_of_steps, unpack
from native_driver import COMPILER, NativeFakeDriver

from dsagen.errors import GuardError
from dsagen.matrix import expand
from dsagen.runtime import step_ops
from dsagen.runtime.api import Kernels
from dsagen.spec import InvalidSpecError, load_spec

BATCH, WIDTH, PAGE, K = 2, 40_000, 64, 32
COLUMNS = -(-WIDTH // PAGE)
STEP = ["indexer_logits", "topk", "sparse_decode"]
INDEX = {"heads": 64, "accumulation": "fast", "histogram": True}
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": STEP, "index": INDEX, "topk": 64}
LEVELS = {**SPEC, "index": {**INDEX, "forms": ["paged", "blocks", "candidates"]}}


@pytest.fixture(autouse=True)
def no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share rows as where no clusters hold them."""
    monkeypatch.setenv("DSAGEN_TOPK_CLUSTER", "1")


def make(driver=FakeDriver, spec=SPEC, **changes: Any):
    fake = driver()
    take_registers_of_steps(fake)
    return fake, Kernels(load_spec({**spec, **changes}), open_driver=lambda: fake, read=fake_cubins)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def given(next_n: int = 1) -> dict[str, Any]:
    return {
        "q": torch.zeros(BATCH, next_n, 16, 576).bfloat16(),
        "k_cache": bytes_of(2, PAGE, 1, 656),
        "index_q": bytes_of(BATCH, next_n, 64, 128),
        "index_cache": bytes_of(2, PAGE, 1, 132),
        "weights": torch.zeros(BATCH * next_n, 64),
        "context_lens": ints(BATCH, next_n),
        "block_table": ints(BATCH, COLUMNS),
    }


def kinds(kernels, driver) -> list[str]:
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [plans[record.symbol].variant.kernel for record in driver.launches]


def arguments(kernels, driver) -> list[dict[str, Any]]:
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [unpack(record.block, plans[record.symbol]) for record in driver.launches]


@pytest.mark.parametrize("driver", [FakeDriver, NativeFakeDriver])
def test_the_selection_begins_with_what_was_counted(driver, monkeypatch):
    if driver is NativeFakeDriver and COMPILER is None:
        pytest.skip("needs a C compiler")
    driver, kernels = make(driver)
    plan, call = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K), given()
    kernels.decode_step(**call, plan=plan)
    assert kinds(kernels, driver)[:3] == ["counted", "select", "main"]
    logits, topk, *_ = arguments(kernels, driver)
    workspace = plan.selection.workspace.data_ptr()
    assert logits["histograms"] == topk["histograms"] == workspace
    assert (logits["unscored"], topk["k"], logits["most_keys"], topk["width"]) == (K, K, WIDTH, WIDTH)
    assert logits["lens"] == topk["lengths"] == call["context_lens"].data_ptr()
    assert kernels.decode_step_slugs(plan) == tuple(
        plan.slug for record in driver.launches for plan in kernels._on(0).plans if plan.symbol == record.symbol
    )
    first = list(driver.launches)
    driver.launches.clear()
    if isinstance(driver, NativeFakeDriver):
        monkeypatch.setattr("dsagen.runtime.launch.OpLaunches.launch", lambda *_: pytest.fail("was checked again"))
    kernels.decode_step(**call, plan=plan)
    # Of attention outputs are new.
    assert [(r.symbol, bytes(r.block)) for r in driver.launches[:2]] == [(r.symbol, bytes(r.block)) for r in first[:2]]
    assert [r.symbol for r in driver.launches] == [r.symbol for r in first]


def test_a_selection_begins_early_unless_asked_not_to():
    driver, kernels = make()
    for overlap in (True, False):
        driver.launches.clear()
        kernels.decode_step(**given(), plan=kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, overlap=overlap))
        # Kernels of scores and attention wait by themselves for whatever comes before them.
        assert [r.config.overlaps_previous for r in driver.launches][:3] == [True, overlap, True]


def test_scores_are_counted_where_blocks_share_rows():
    _, kernels = make()
    cases = (
        ((BATCH, 1, WIDTH), {}, True),
        ((BATCH, 2, WIDTH), {}, True),
        ((BATCH, 1, WIDTH), {"histogram": True}, True),
        ((BATCH, 1, WIDTH), {"histogram": False}, False),
        # More tokens than have room for counts, rows that one block holds, and more of them than three SMs each.
        ((BATCH, 3, WIDTH), {}, False),
        ((BATCH, 1, 1000), {}, False),
        ((64, 1, WIDTH), {}, False),
    )
    for sizes, options, counts in cases:
        plan = kernels.plan_decode_step(*sizes, k=K, **options)
        assert (plan.selection.counted is not None) == counts, sizes
        slugs = kernels.decode_step_slugs(plan)
        assert ("-counted-" in slugs[0], "-select-" in slugs[1]) == (counts, counts)
    # At the width that a block holds where rows are aligned, as those of a plan are.
    assert kernels.plan_decode_step(BATCH, 1, 32_768, k=K).selection.counted is None
    assert kernels.plan_decode_step(BATCH, 1, 32_769, k=K).selection.counted is not None
    text = kernels.explain("decode_step", batch=BATCH, width=WIDTH, topk=K)
    assert "scores are counted by indexer_logits-counted-hopper-" in text and "[IL-33] next_n <= counted" in text
    scoring, selecting = kernels.decode_step_slugs(kernels.plan_decode_step(BATCH, 1, WIDTH, k=K))[:2]
    assert [line for line in text.splitlines() if line.startswith("kernel: ")] == [f"kernel: {scoring}"]
    assert f"chosen: {selecting}\n" in text and "-count-" not in text.split("chosen: ")[1]
    text = kernels.explain("decode_step", batch=BATCH, s_q=3, width=WIDTH, topk=K)
    assert "scores are not counted where they are made: indexer_logits-counted-hopper-" in text
    assert "has room for counts of 2 tokens of a request" in text
    assert "kernel: indexer_logits-counted-" not in text and "kernel: indexer_logits-main-" in text
    # By itself no call counts.
    assert "-counted-" not in kernels.explain("indexer_logits", batch=BATCH, width=WIDTH)
    text = kernels.explain("decode_step", batch=BATCH, width=1000, topk=K)
    assert "scores are not counted where they are made: rows that no blocks share have no first pass" in text


def test_rows_that_clusters_hold_are_not_counted(monkeypatch):
    monkeypatch.delenv("DSAGEN_TOPK_CLUSTER")
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, overlap=True)
    assert plan.selection.counted is None and plan.selection.workspace is None
    kernels.decode_step(**given(), plan=plan)
    scoring, selecting = driver.launches[:2]
    assert "-launch.dependent" in kernels.decode_step_slugs(plan)[1] and "row_cluster" in selecting.symbol
    assert (selecting.config.cluster, selecting.config.grid, selecting.config.overlaps_previous) == (8, 8 * BATCH, True)
    assert kinds(kernels, driver)[:2] == ["main", "main"] and "counted" not in scoring.symbol
    text = r"^\[T-22\] histogram: 2 rows of 40000 scores: .*, or set DSAGEN_TOPK_CLUSTER=1, for clusters of 8 CTAs"
    with pytest.raises(GuardError, match=text):
        kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, histogram=True)
    # Longer ones than eight CTAs hold are shared and counted.
    assert kernels.plan_decode_step(BATCH, 1, 262_144, k=K).selection.counted is None
    assert kernels.plan_decode_step(BATCH, 1, 262_145, k=K).selection.counted is not None
    told = kernels.explain("decode_step", batch=BATCH, width=WIDTH, topk=K)
    assert "scores are not counted where they are made: clusters of 8 CTAs hold the rows, and read them once" in told


def test_more_tokens_than_gain_by_counts_have_none_unless_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(step_ops, "MOST_COUNTED_ROWS", BATCH - 1)
    _, kernels = make()
    assert kernels.plan_decode_step(BATCH, 1, WIDTH, k=K).selection.counted is None
    assert kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, histogram=True).selection.counted is not None
    text = kernels.explain("decode_step", batch=BATCH, width=WIDTH, topk=K)
    assert f"more than {BATCH - 1} tokens (histogram=True asks for it): of 1 an H200 is faster so, of 16 slower" in text


@pytest.mark.parametrize(
    ("sizes", "histogram", "message"),
    [
        (
            (BATCH, 3, WIDTH),
            True,
            r"\[IL-33\] histogram: 3 tokens of a request, and shared memory has room for counts of 2",
        ),
        ((BATCH, 1, 1000), True, r"\[T-22\] histogram: 2 rows of 1000 scores: of so many rows that long top-k has no"),
        ((BATCH, 1, WIDTH), 1, r"\[T-12\] histogram: expected True or False"),
    ],
)
def test_counts_that_cannot_be(sizes, histogram, message):
    _, kernels = make()
    with pytest.raises(GuardError, match=f"^{message}"):
        kernels.plan_decode_step(*sizes, k=K, histogram=histogram)


def test_specs_that_do_not_declare_it_have_no_counts():
    driver, kernels = make(index={"heads": 64, "accumulation": "fast"})
    with pytest.raises(GuardError, match=r"^\[T-22\] histogram: the spec \w+ does not declare it: set index.histogram"):
        kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, histogram=True)
    for options in ({}, {"histogram": False}):
        driver.launches.clear()
        kernels.decode_step(**given(), plan=kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, **options))
        assert kinds(kernels, driver)[:3] == ["main", "count", "select"]
    assert "histogram" not in kernels.spec.to_yaml() and "counted" not in kernels.explain(
        "decode_step", batch=BATCH, width=WIDTH
    )


def test_a_selection_that_is_refused_leaves_no_counts(monkeypatch):
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K)
    # After the scores were counted, by their kernel.
    wrong = {**given(), "kv_block_table": ints(BATCH, COLUMNS), "k_cache": bytes_of(2, PAGE, 1, 656)}
    with monkeypatch.context() as patch:
        patch.setattr(type(kernels), "_select_counted", lambda *_: (_ for _ in ()).throw(GuardError("refused")))
        with pytest.raises(GuardError, match="refused"):
            kernels.decode_step(**wrong, plan=plan)
    assert kinds(kernels, driver) == ["counted"]
    plan.selection.workspace.fill_(1)
    kernels.decode_step(**given(), plan=plan)
    assert not plan.selection.workspace.any()


def test_zeros_that_a_capture_records_are_not_there_yet(monkeypatch):
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K)
    kernels.decode_step(**given(), plan=plan)
    plan.selection.spoil()
    driver.capturing = True
    kernels.decode_step(**given(), plan=plan)
    driver.capturing = False
    # Until a replay memory is as it was, so the next call sets zeros itself, before the scores are counted.
    plan.selection.workspace.fill_(1)
    before, zeroed = len(driver.launches), []
    zero = torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda t: (zeroed.append(len(driver.launches)), zero(t))[1])
    kernels.decode_step(**given(), plan=plan)
    assert zeroed == [before] and not plan.selection.workspace.any()
    assert kinds(kernels, driver)[before:][:2] == ["counted", "select"]


def test_values_are_checked_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K)
    long = {**given(), "context_lens": torch.tensor([[5], [WIDTH + 1]], dtype=torch.int32)}
    with pytest.raises(GuardError, match=r"^\[IL-14\] context_lens: token 0 of request 1 sees 40001 keys"):
        kernels.decode_step(**long, plan=plan)
    assert not driver.launches
    for _ in range(2):
        kernels.decode_step(**given(), plan=plan)
    assert kinds(kernels, driver).count("counted") == kinds(kernels, driver).count("select") == 2


def test_calls_of_top_k_with_the_plan_count_by_themselves():
    driver, kernels = make()
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K)
    kernels.decode_step(**given(), plan=plan)
    driver.launches.clear()
    for _ in range(2):
        kernels.topk(plan.scores, k=K, lengths=ints(BATCH), plan=plan.selection)
    assert kinds(kernels, driver) == ["count", "select"] * 2


def test_layers_that_choose_blocks_count_by_themselves():
    driver, kernels = make(spec=LEVELS)
    plan = kernels.plan_decode_step(BATCH, 1, WIDTH, k=K, candidate_blocks=16)
    kernels.decode_step(**given(), plan=plan, candidates="choose")
    assert kinds(kernels, driver)[0] == "blocks" and kinds(kernels, driver)[2:4] == ["count", "select"]
    driver.launches.clear()
    kernels.decode_step(**given(), plan=plan)
    assert kinds(kernels, driver)[:2] == ["counted", "select"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": ["indexer_logits", "topk"]}, "index.histogram = True: decode steps read it: add sparse_decode to ops"),
        ({"ops": ["indexer_logits"]}, "index.histogram = True: decode steps read it: add topk, sparse_decode to ops"),
        (
            {"index": {**INDEX, "forms": ["ragged"]}},
            "index.histogram = True: decode steps read it: add paged to index.f",
        ),
        ({"index": {**INDEX, "histogram": 1}}, "index.histogram = 1"),
    ],
)
def test_declarations_that_nothing_reads_are_refused(changes, message):
    with pytest.raises(InvalidSpecError, match=message):
        load_spec({**SPEC, **changes})


def test_a_declaration_is_shown_and_comes_back():
    spec = load_spec(SPEC)
    assert load_spec(spec.to_mapping()) == spec and "histogram: true" in spec.to_yaml()
    assert "histogram" not in spec.replace(index={**INDEX, "histogram": False}).to_yaml()
    kept = spec.only("indexer_logits")
    assert kept.index is not None and not kept.index.histogram


@pytest.mark.parametrize("keys", ["fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
def test_every_arch_has_a_kernel_that_counts(arch, keys):
    (cell,) = [
        cell
        for cell in expand(load_spec({**SPEC, "archs": [arch], "index": {**INDEX, "keys": keys}})).cells
        if cell.role == "counted"
    ]
    assert (
        cell.kept and cell.variant is not None and cell.variant.body == ("hopper" if arch == "sm_90a" else "mma_sync")
    )
