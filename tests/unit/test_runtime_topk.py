"""Top-k through the runtime: the argument block of a call, and every argument that does not fit."""

from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack
from native_driver import IntsFakeDriver, NativeFakeDriver

from dsagen.check.run import run_case
from dsagen.check.topk_calls import MODES
from dsagen.check.topk_cases import MOST_SLOTS, Probe, topk_cases
from dsagen.check.topk_run import TopkRun
from dsagen.errors import DeviceError, FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.topk import DETERMINISM
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

ROWS, WIDTH, K = 3, 500, 64
LONG = 512 << 10  # scores of a row that blocks share in two launches: too long for the memory of a cluster
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["topk"]}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(**changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=60))
    return driver, Kernels(load_spec({**SPEC, **changes}), open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture
def kernels():
    return make()[1]


def blocks(kernels, driver):
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [unpack(record.block, plans[record.symbol]) for record in driver.launches]


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def test_block_of_a_plain_call():
    driver, kernels = make()
    scores = torch.zeros(ROWS, WIDTH)
    out = kernels.topk(scores, k=K)
    (block,) = blocks(kernels, driver)
    assert block == {
        **dict.fromkeys(block, 0),
        "scores": scores.data_ptr(),
        "row_stride": WIDTH,
        "width": WIDTH,
        "rows": ROWS,
        "row_step": ROWS,
        "k": K,
        "out": out.data_ptr(),
        "out_stride": K,
        "page_size": 1,
        "page_multiplier": 2**31,
    }
    assert (out.shape, out.dtype, out.is_contiguous()) == ((ROWS, K), torch.int32, True)
    (record,) = driver.launches
    plan = kernels._on(0).by_role["topk", "main"][1]
    assert record.symbol == plan.symbol
    assert (record.config.grid, record.config.threads, record.config.smem_bytes) == (ROWS, 1024, plan.smem_bytes)
    assert not record.config.overlaps_previous


def test_block_of_a_call_with_everything():
    driver, kernels = make(scores="bf16")
    scores = torch.zeros(ROWS, 2 * WIDTH, dtype=torch.bfloat16)[:, 1 : WIDTH + 1]
    rows = {name: ints(ROWS) for name in ("lengths", "starts", "offsets", "table_of_row", "table_starts", "counts")}
    table, out, raw = ints(7, 20)[:, :11], ints(ROWS, K + 5)[:, :K], ints(ROWS, K + 9)[:, 4 : K + 4]
    options = {"page_table": table, "page_size": 48, "drop_neg_inf": True, "determinism": "order"}
    result = kernels.topk(scores, k=K, out=out, raw=raw, **options, **rows)
    (block,) = blocks(kernels, driver)
    multiplier, shift = block.pop("page_multiplier"), block.pop("page_shift")
    assert all(n * multiplier >> (31 + shift) == n // 48 for n in range(1000))
    assert block == {
        "scores": scores.data_ptr(),
        "row_stride": 2 * WIDTH,
        "width": WIDTH,
        "rows": ROWS,
        "row_step": ROWS,
        "k": K,
        "ordered": 1,
        "drops_neg_inf": 1,
        "out": out.data_ptr(),
        "out_stride": K + 5,
        "raw": raw.data_ptr(),
        "raw_stride": K + 9,
        "page_table": table.data_ptr(),
        "table_stride": 20,
        "table_rows": 7,
        "table_columns": 11,
        "page_size": 48,
        **{name: tensor.data_ptr() for name, tensor in rows.items()},
    }
    assert result is out


def test_candidate_blocks_are_pages_of_eight():
    driver, kernels = make()
    candidates = ints(ROWS, 63)
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K, candidate_blocks=candidates)
    (block,) = blocks(kernels, driver)
    assert (block["page_table"], block["page_size"], block["table_columns"]) == (candidates.data_ptr(), 8, 63)
    assert (block["page_multiplier"] * 17) >> (31 + block["page_shift"]) == 2


def test_an_empty_table_is_still_a_table():
    driver, kernels = make()
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K, page_table=ints(ROWS, 0))
    (block,) = blocks(kernels, driver)
    assert block["page_table"] != 0 and block["table_columns"] == 0


def test_no_rows_and_no_columns():
    driver, kernels = make()
    assert kernels.topk(torch.zeros(0, WIDTH), k=K).shape == (0, K)
    assert driver.launches == []
    assert kernels.topk(torch.zeros(ROWS, 0), k=K).shape == (ROWS, K)
    assert [record.config.grid for record in driver.launches] == [ROWS]


def test_the_stride_of_a_single_row_does_not_matter():
    driver, kernels = make()
    kernels.topk(torch.zeros(1, WIDTH).as_strided((1, WIDTH), (7, 1)), k=K)
    assert blocks(kernels, driver)[0]["row_stride"] == 0


def test_a_spec_with_both_ops_loads_the_kernels_of_both():
    driver, kernels = make(ops=["sparse_decode", "topk"])
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    assert driver.loads == [kernels._on(0).by_role["topk", "main"][1].symbol]
    assert len(kernels._on(0).plans) == 7 + 2


def test_each_op_needs_to_be_declared(kernels):
    with pytest.raises(GuardError, match=r"^\[T-11\] sparse_decode: the spec v32_h16 declares ops topk: add it there"):
        kernels.plan_sparse_decode(1, 1, 64)
    decode = Kernels(load_spec("v32_h16"), open_driver=FakeDriver, read=fake_cubins)
    with pytest.raises(GuardError, match=r"^\[T-11\] topk: the spec v32_h16 declares ops sparse_decode"):
        decode.topk(torch.zeros(ROWS, WIDTH), k=K)


def test_the_capacity_is_that_of_the_cache_that_is_selected_from():
    _, kernels = make(topk=100)
    kernels.topk(torch.zeros(ROWS, WIDTH), k=100)
    with pytest.raises(GuardError, match=r"^\[TK-04\] k: 101, the spec declares a capacity of 100: pass 1\.\.100 or"):
        kernels.topk(torch.zeros(ROWS, WIDTH), k=101)
    _, kernels = make(model="v4", ops=["topk"])
    kernels.topk(torch.zeros(ROWS, WIDTH), k=1024)


WRONG = [
    ({"k": 0}, "[TK-04] k: 0, the spec declares"),
    ({"k": 2049}, "[TK-04] k: 2049, the spec declares"),
    ({"k": 64.0}, "[T-12] k: expected a whole number, found 64.0 (float)"),
    ({"k": True}, "[T-12] k: expected a whole number, found True (bool)"),
    ({"drop_neg_inf": "no"}, "[T-12] drop_neg_inf: expected True or False, found 'no' (str): pass a bool"),
    ({"drop_neg_inf": 2}, "[T-12] drop_neg_inf: expected True or False, found 2 (int)"),
    ({"determinism": "sorted"}, "[T-12] determinism: expected one of off, set, order, found 'sorted'"),
    ({"determinism": torch.zeros(3)}, "[T-12] determinism: expected one of off, set, order, found tensor([0., 0., "),
    ({"determinism": True}, "[T-12] determinism: expected one of off, set, order, found True"),
    ({"determinism": ["set"]}, "[T-12] determinism: expected one of off, set, order, found ['set']"),
    ({"plan": "plan"}, "[T-09] plan: was not made by these kernels: pass what their plan_topk returned"),
    ({"scores": [1.0]}, "[T-01] scores: expected a torch.Tensor, found list"),
    ({"scores": torch.zeros(ROWS, WIDTH, requires_grad=True)}, "[T-02] scores: requires grad"),
    ({"scores": torch.zeros(ROWS, WIDTH, device="meta")}, "[T-03] scores: on meta, expected a CUDA device"),
    ({"scores": torch.zeros(ROWS, WIDTH).bfloat16()}, "[T-04] scores: dtype bfloat16, expected float32 for [rows, w"),
    ({"scores": torch.zeros(WIDTH)}, "[T-05] scores: 1 dims (500,), expected 2: [rows, width]"),
    ({"scores": torch.zeros(WIDTH, ROWS).T}, "[T-07] scores: last dim has stride 3, expected 1"),
    ({"scores": torch.zeros(ROWS, WIDTH).to_sparse()}, "[T-14] scores: has the layout sparse_coo"),
    ({"lengths": torch.zeros(ROWS, dtype=torch.int64)}, "[T-04] lengths: dtype int64, expected int32 for [rows]"),
    ({"lengths": ints(ROWS, 1)}, "[T-05] lengths: 2 dims (3, 1), expected 1: [rows] = (3,)"),
    ({"lengths": ints(ROWS + 1)}, "[T-06] lengths: shape (4,), expected [rows] = (3,)"),
    ({"lengths": ints(ROWS * 2)[::2]}, "[T-07] lengths: last dim has stride 2"),
    ({"lengths": ints(ROWS).to("meta")}, "[T-03] lengths: on meta, scores is on cpu"),
    ({"starts": ints(1)}, "[T-06] starts: shape (1,)"),
    ({"offsets": ints(1)}, "[T-06] offsets: shape (1,)"),
    ({"page_table": ints(ROWS + 1, 9)}, "[T-06] page_table: shape (4, 9), expected [rows, pages] = (3, *)"),
    ({"page_table": ints(9, ROWS).T}, "[T-07] page_table: last dim has stride 3"),
    ({"page_table": ints(4, 9), "table_of_row": ints(2)}, "[T-06] table_of_row: shape (2,)"),
    ({"page_table": ints(ROWS, 9), "table_starts": ints(2)}, "[T-06] table_starts: shape (2,)"),
    ({"page_table": ints(ROWS, 9), "page_size": 0}, "[TK-07] page_size: 0 is outside 1..1073741824"),
    ({"page_table": ints(ROWS, 9), "page_size": 2**30 + 1}, "[TK-07] page_size: 1073741825 is outside"),
    ({"page_table": ints(ROWS, 9), "page_size": "64"}, "[T-12] page_size: expected a whole number, found '64' (str)"),
    ({"page_table": ints(ROWS, 9), "candidate_blocks": ints(ROWS, 9)}, "[T-15] candidate_blocks: given with page_tab"),
    ({"candidate_blocks": ints(ROWS, 9).long()}, "[T-04] candidate_blocks: dtype int64, expected int32 for [rows"),
    ({"candidate_blocks": ints(9)}, "[T-05] candidate_blocks: 1 dims (9,), expected 2: [rows, blocks] = (3, *)"),
    ({"candidate_blocks": ints(ROWS + 1, 9)}, "[T-06] candidate_blocks: shape (4, 9), expected [rows, blocks] = (3"),
    ({"candidate_blocks": ints(9, ROWS).T}, "[T-07] candidate_blocks: last dim has stride 3, expected 1"),
    ({"candidate_blocks": [[1]]}, "[T-01] candidate_blocks: expected a torch.Tensor, found list"),
    ({"candidate_blocks": ints(ROWS, 9).float().requires_grad_()}, "[T-02] candidate_blocks: requires grad"),
    ({"candidate_blocks": ints(ROWS, 9).to("meta")}, "[T-03] candidate_blocks: on meta, scores is on cpu"),
    ({"page_size": 64}, "[T-15] page_size, table_of_row, table_starts: nothing reads them without page_table"),
    ({"table_of_row": ints(ROWS)}, "[T-15] page_size, table_of_row, table_starts: nothing reads"),
    ({"candidate_blocks": ints(ROWS, 9), "page_size": 8}, "[T-15] page_size"),
    ({"out": ints(ROWS, K + 1)}, "[T-06] out: shape (3, 65), expected [rows, k] = (3, 64)"),
    ({"out": torch.zeros(ROWS, K, dtype=torch.int64)}, "[T-04] out: dtype int64, expected int32"),
    ({"out": ints(1, K).expand(ROWS, K)}, "[T-08] out: strides (0, 1) of shape (3, 64) let elements share memory"),
    ({"raw": ints(ROWS, K - 1)}, "[T-06] raw: shape (3, 63)"),
    ({"counts": ints(ROWS, 1)}, "[T-05] counts: 2 dims"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_does_not_fit_is_named(kernels, changes, message):
    arguments = {"scores": torch.zeros(ROWS, WIDTH), "k": K, **changes}
    with pytest.raises(GuardError) as caught:
        kernels.topk(arguments.pop("scores"), **arguments)
    assert str(caught.value).startswith(message)


def test_outputs_share_no_memory_with_anything(kernels):
    both = ints(ROWS, 2 * K)
    with pytest.raises(GuardError, match=r"\[T-08\] out: its memory overlaps that of raw"):
        kernels.topk(torch.zeros(ROWS, WIDTH), k=K, out=both[:, :K], raw=both[:, K:])
    lengths = ints(ROWS)
    with pytest.raises(GuardError, match=r"\[T-08\] counts: its memory overlaps that of lengths"):
        kernels.topk(torch.zeros(ROWS, WIDTH), k=K, lengths=lengths, counts=lengths)


def test_windows_are_checked_when_asked_for(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    scores, lengths = torch.zeros(ROWS, WIDTH), torch.tensor([WIDTH, -5, 0], dtype=torch.int32)
    kernels.topk(scores, k=K, lengths=lengths)
    kernels.topk(scores, k=K, starts=torch.tensor([0, WIDTH, 3], dtype=torch.int32))
    starts = torch.tensor([0, 4, 3], dtype=torch.int32)
    text = r"^\[TK-09\] window of row 1: 497 scores from 4 leave the row's 500 \(1 rows do\)"
    with pytest.raises(GuardError, match=text):
        kernels.topk(scores, k=K, lengths=torch.full((ROWS,), 497, dtype=torch.int32), starts=starts)
    with pytest.raises(GuardError, match=r"^\[TK-09\] window of row 2: "):
        kernels.topk(scores, k=K, lengths=lengths, starts=torch.tensor([0, 0, -1], dtype=torch.int32))
    driver.capturing = True
    with pytest.raises(GuardError, match=r"^\[T-13\] DSAGEN_CHECK_INDICES"):
        kernels.topk(scores, k=K)


BAD_TABLES = [
    ({"table_of_row": [0, 4, 1]}, "[TK-20] table_of_row[1] = 4: page_table has 4 rows"),
    ({"table_of_row": [-1, 4, 1]}, "[TK-20] table_of_row[0] = -1: "),
    (
        {"table_starts": [0, -1, 0]},
        "[TK-21] page_table: row 1 reads 8 entries from column -1 (table_starts), and a row",
    ),
    ({"table_starts": [0, 3, 0]}, "[TK-21] page_table: row 1 reads 8 entries from column 3 "),
    (
        {"page_size": 32},
        "[TK-21] page_table: row 0 reads 16 entries from column 0 (table_starts), and a row of it has 10",
    ),
    ({"page_table": (2**31 - 1) // 64 + 1}, "[TK-22] page_table: ids of row 0 may be 2147483648..2147483711, outside"),
    ({"offsets": [0, 2**31 - 499, 0]}, "[TK-22] page_table: ids of row 1 may be 2147483149..2147483648, outside"),
    ({"offsets": [0, -1, 0]}, "[TK-22] page_table: ids of row 1 may be -1..498, outside 0..2147483647"),
]


def table_call(page_table=None, page_size=64, **lists):
    """Tables of 10 pages for windows of 500 scores; a number stands for all pages of one, lists for tensors."""
    pages = torch.arange(10).repeat(4, 1) if page_table is None else torch.full((4, 10), page_table)
    given = {"table_of_row": [0, 3, 1], **lists}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in given.items()}
    return {"k": K, "page_table": pages.int(), "page_size": page_size, **tensors}


@pytest.mark.parametrize(("changes", "message"), BAD_TABLES, ids=[message[:50] for _, message in BAD_TABLES])
def test_ids_that_tables_do_not_give_are_an_error_when_asked_for(monkeypatch, changes, message):
    scores = torch.zeros(ROWS, WIDTH)
    make()[1].topk(scores, **table_call(**changes))
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    with pytest.raises(GuardError) as caught:
        kernels.topk(scores, **table_call(**changes))
    assert str(caught.value).startswith(message)
    assert not driver.launches


def test_ids_up_to_int32_and_padding_pass_the_check(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    scores = torch.zeros(ROWS, WIDTH)
    empty = torch.tensor([0, WIDTH, -3], dtype=torch.int32)
    kernels.topk(scores, **table_call())
    kernels.topk(scores, **table_call(table_starts=[2, 0, 1]))
    kernels.topk(scores, **table_call(page_table=-1, offsets=[5, -5, 2**31 - 1]))  # padding: no id, no overflow
    kernels.topk(scores, lengths=empty, **table_call(table_of_row=[-9, 3, 99], table_starts=[-1, 2, 11]))
    kernels.topk(scores, **table_call(offsets=[0, 2**31 - 500, 0]))
    kernels.topk(scores, k=K, offsets=torch.tensor([0, 2**31 - 500, 9], dtype=torch.int32))
    # Of its last page, which is the last of int32, the window reads 52 tokens and the offset takes the rest.
    kernels.topk(scores, **table_call(page_table=2**25 - 1, offsets=[0, 0, -64]))
    assert len(driver.launches) == 7
    with pytest.raises(GuardError, match=r"^\[TK-22\] offsets: ids of row 1 may be 2147483149..2147483648, outside"):
        kernels.topk(scores, k=K, offsets=torch.tensor([0, 2**31 - 499, 9], dtype=torch.int32))
    with pytest.raises(GuardError, match=r"^\[TK-21\] candidate_blocks: row 0 reads 63 entries from column 0 "):
        kernels.topk(scores, k=K, candidate_blocks=ints(ROWS, 62))


def test_capture_needs_a_loaded_kernel():
    driver, kernels = make()
    driver.capturing = True
    with pytest.raises(FrozenError, match="during CUDA graph capture is not possible"):
        kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    driver.capturing = False
    kernels.prepare()
    kernels.freeze()
    driver.capturing = True
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    assert len(driver.launches) == 1


def test_each_grid_and_stream_has_a_launch_of_its_own_and_old_ones_go():
    driver, kernels = make()
    for rows in (1, 2, 1):
        kernels.topk(torch.zeros(rows, WIDTH), k=K)
    driver.stream = 7
    kernels.topk(torch.zeros(1, WIDTH), k=K)
    assert [(r.config.grid, r.config.stream) for r in driver.launches] == [(1, 0), (2, 0), (1, 0), (1, 7)]
    for rows in range(1, 300):
        kernels.topk(torch.zeros(rows, 1), k=1)
    # What a machine without a launcher keeps; with one it is calls, if it reads their tensors.
    most = {FakeDriver: 64, NativeFakeDriver: 256, IntsFakeDriver: 0}[type(driver)]
    assert 0.1 * most <= len(kernels._topk_launches) <= most


def test_a_failing_launch_names_op_kernel_and_arguments():
    driver, kernels = make()
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceError, match=r"^topk: topk-main-row_resident-sm_90a-.* failed on device 0: .* k=64, "):
        kernels.topk(torch.zeros(ROWS, WIDTH), k=K)


def test_explain_says_what_is_checked(kernels):
    text = kernels.explain("topk", batch=64, s_q=2, topk=512, width=5000)
    head = "topk: v32_h16 on device 0 (fake H200, sm_90a, 132 SMs)\nshape: 128 rows of 5000 scores, k 512\n"
    assert text.startswith(head)
    assert "[TK-04] 1 <= k and k <= topk_capacity  k=512  topk_capacity=2048  holds" in text
    assert "[TK-07] 1 <= page_size and page_size <= 1073741824" in text
    assert text.endswith("grid: 128 CTAs\nworkspace: 0 B")
    size = kernels.topk_workspace_bytes(4, LONG, 2048)
    assert kernels.explain("topk", batch=4, width=LONG).endswith(f"grid: 132 CTAs, 33 a row\nworkspace: {size} B")
    assert "refuses: k: 4096" in kernels.explain("topk", batch=1, topk=4096, width=9)
    assert kernels.explain("topk", batch=1, topk=4096, width=9).endswith("chosen: none")
    for size in ({"batch": "2"}, {"batch": 1, "s_q": 1.5}, {"batch": 1, "topk": True}, {"batch": 1, "width": 9.0}):
        with pytest.raises(GuardError, match=rf"^\[T-12\] {list(size)[-1]}: expected a whole number, found "):
            kernels.explain("topk", **{"width": 9, **size})
    with pytest.raises(GuardError, match=r"^\[T-16\] width: missing, and what a call of topk takes depends on"):
        kernels.explain("topk", batch=1)


@pytest.mark.parametrize(
    ("rows", "width", "needed", "planned"),
    [
        # Eight CTAs hold a row of so many scores that starts at 16 bytes, and none that starts behind.
        (1, 262_144, 0, 270_592),
        # Clusters of eight hold what one CTA does not.
        (1, 32_768, 0, 0),
        (1, LONG, 532_736, 532_736),
    ],
)
def test_explain_tells_the_workspace_of_a_call_and_of_a_plan(rows, width, needed, planned):
    _, kernels = make()
    text = kernels.explain("topk", batch=rows, width=width).splitlines()[-1]
    told = "" if needed == planned else f" (a plan has {planned} B, for rows that do not start at multiples of 16 B)"
    assert text == f"workspace: {needed} B{told}"
    assert kernels.plan_topk(rows, width, 2048).workspace_bytes == planned


def test_one_is_told_as_one():
    _, kernels = make()
    assert "shape: 1 row of 9 scores, k 2048\n" in kernels.explain("topk", batch=1, width=9)
    assert "shape: 2 rows of 1 score, k 2048\n" in kernels.explain("topk", batch=2, width=1)
    text = kernels.explain("topk", batch=1, width=512 << 10)
    assert "refuses: a cluster of 8 CTAs for each row, 1 in all: the device holds " in text


def test_explain_asks_the_device_for_clusters_that_only_a_plan_takes():
    driver, kernels = make()
    driver.clusters = 0
    text = kernels.explain("topk", batch=1, width=32_768)
    planned = kernels.topk_workspace_bytes(1, 32_768, 2048)
    assert planned > 0 and text.endswith(f"(a plan has {planned} B, for rows that do not start at multiples of 16 B)")


def test_only_order_asks_the_kernel_for_it():
    driver, kernels = make()
    for mode in DETERMINISM:
        kernels.topk(torch.zeros(ROWS, WIDTH), k=K, determinism=mode)
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    found = dict(zip((*DETERMINISM, "default"), (block["ordered"] for block in blocks(kernels, driver)), strict=True))
    assert found == {"off": 0, "set": 0, "order": 1, "default": 0}


# Its cases are large, so one launcher has to do.
@pytest.mark.parametrize("each_launcher", ["c"], indirect=True)
@pytest.mark.parametrize("scores", ["fp32", "bf16"])
def test_every_call_of_the_check_is_accepted(scores, monkeypatch):
    monkeypatch.setattr(TopkRun, "compare", lambda *_: None)
    driver, kernels = make(scores=scores, topk=MOST_SLOTS)
    symbols = {plan.slug: plan.symbol for plan in kernels._on(0).plans}
    cases = [case for case in topk_cases("quick", MODES) if case.probe is Probe.PLAIN]
    for case in cases:
        if not case.name.startswith("topk.body.shared."):
            case = replace(case, rows=min(case.rows, 9), width=min(case.width, 5000))
        del driver.launches[:]
        result, _ = run_case(TopkRun(case, lambda _: kernels, torch.device("cpu"), 1))
        assert result.status == "passed", (case.name, result.problem)
        # What evidence is recorded for is what was launched.
        launched = [record.symbol for record in driver.launches]
        assert sorted(symbols[slug] for slug in result.slugs) == sorted(launched)
        assert len(launched) == (2 if case.width > 65536 * 8 else 1)
    assert len(cases) > 300


def test_the_kernels_of_a_call_are_told_by_its_tensors():
    driver, kernels = make()
    by_role = kernels._on(0).by_role
    small, large, swept, swept_by_two, clustered = (plan.slug for plan in by_role["topk", "main"])
    shared = tuple(by_role["topk", role][0].slug for role in ("count", "select"))
    memory = torch.zeros(90 * 40_000)
    for rows, width, first, wanted in (
        (0, WIDTH, 0, ()),
        (ROWS, 8192, 0, (large,)),
        (133, 8192, 0, (small,)),
        (133, 8192, 1, (swept_by_two,)),
        (133, 8188, 1, (small,)),
        (90, 32_768, 0, (large,)),
        (90, 32_768, 1, (swept,)),
        (ROWS, 32_768, 1, (clustered,)),
        (ROWS, 8 * 32_768, 0, (clustered,)),
        (ROWS, 8 * 32_768, 1, shared),
        (90, 40_000, 0, (swept,)),
    ):
        scores = memory[first : first + rows * width].view(rows, width)
        assert kernels.topk_slugs(scores, k=K) == wanted
        del driver.launches[:]
        kernels.topk(scores, k=K)
        assert tuple(record.symbol for record in driver.launches) == tuple(
            plan.symbol for slug in wanted for plan in kernels._on(0).plans if plan.slug == slug
        )
    # Windows may start anywhere.
    assert kernels.topk_slugs(torch.zeros(133, 8192), k=K, starts=ints(133)) == (swept_by_two,)
    with pytest.raises(GuardError, match=r"^\[TK-04\] k: 0, "):
        kernels.topk_slugs(torch.zeros(ROWS, WIDTH), k=0)
    with pytest.raises(GuardError, match=r"^\[T-01\] scores: expected a torch.Tensor, found list"):
        kernels.topk_slugs([1.0], k=K)
