"""Choice tables: what a row may hold, which one decides, and why others do not."""

import json
from dataclasses import replace

import pytest

from dsagen.arch import arch
from dsagen.cli import main
from dsagen.errors import TableError
from dsagen.families.sparse_decode.choice import candidates, choose, explain_choice
from dsagen.families.sparse_decode.choice_table import (
    Alternative,
    ChoiceRow,
    ChoiceTables,
    read_table,
    read_tables,
    shipped_folder,
)
from dsagen.families.sparse_decode.family import FAMILY, with_all_bodies
from dsagen.families.sparse_decode.op import DecodeShape
from dsagen.plan import Variant
from dsagen.render import render
from dsagen.slug import parse_slug
from dsagen.spec import load_spec
from dsagen.tune.shapes import choices

SPEC = load_spec("v32_h16")
CELLS = with_all_bodies(FAMILY.expand(SPEC, arch("sm_90a")))
HOPPER, PORTABLE = (FAMILY.plan(cell.variant) for cell in CELLS if cell.role == "main")
SHAPE = DecodeShape(3, 1, 16, 2048)
ROW = ChoiceRow(
    kernel=HOPPER.slug,
    text="text of " + HOPPER.slug,
    device="NVIDIA H200",
    driver="580.159.04",
    toolchain="nvcc 13.0.88",
    date="2026-12-01T10:00:00Z",
    heads=16,
    tokens=(2, 4),
    topk=(2048, 2048),
    extra_topk=(0, 0),
    num_splits=32,
    launches=2,
    gpu_us=6.5,
    beside=(Alternative(PORTABLE.slug, 32, 2, 11.4),),
)
CAPACITIES = (2048, 0)


def text_of(plan):
    return "text of " + plan.slug


def decide(*rows, shape=SHAPE, device="NVIDIA H200", plans=(PORTABLE, HOPPER), determinism="off"):
    placed = tuple(replace(row, place=f"table.jsonl:{n}") for n, row in enumerate(rows, 1))
    return ChoiceTables(placed).decide(shape, plans, device, text_of, determinism)


def judged(decision, shape=SHAPE, determinism="off", **options):
    return candidates((HOPPER, PORTABLE), shape, CAPACITIES, 132, determinism, decision=decision, **options)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "table.jsonl"
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", str(path))
    monkeypatch.delenv("DSAGEN_SPARSE_DECODE_BODY", raising=False)
    return path


def bodies(spec=SPEC):
    return [cell.variant.body for cell in FAMILY.expand(spec, arch("sm_90a")) if cell.role == "main"]


def test_a_line_gives_its_row_again(table):
    table.write_text(ROW.to_line() * 2)
    assert read_table(table) == (replace(ROW, place=f"{table}:1"), replace(ROW, place=f"{table}:2"))


def test_a_kernel_that_a_table_names_is_built(table, monkeypatch):
    for rows in ("", ROW.to_line()):
        table.write_text(rows)
        assert bodies() == ["hopper"]
    table.write_text(replace(ROW, kernel=PORTABLE.slug).to_line())
    assert bodies() == ["hopper", "mma_sync"]
    assert bodies(SPEC.replace(heads=32)) == ["hopper"]
    assert bodies(SPEC.replace(determinism="batch_invariant")) == ["hopper"]
    assert [cell.variant.body for cell in FAMILY.expand(SPEC, arch("sm_100a")) if cell.role == "main"] == ["mma_sync"]
    for wanted in ("mma_sync", "hopper"):
        monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", wanted)
        assert bodies() == [wanted]


def test_where_tables_are_looked_for(tmp_path, monkeypatch):
    roots = [tmp_path / "written", tmp_path / "layer"]
    for root in roots:
        (root / "choices").mkdir(parents=True)
        (root / "choices" / "nvidia-h200.jsonl").write_text(ROW.to_line())
    monkeypatch.setenv("DSAGEN_CACHE_DIR", ":".join(map(str, roots)))
    monkeypatch.delenv("DSAGEN_CHOICE_TABLE")
    found = read_tables()
    assert list(found.files)[:2] == [root / "choices" / "nvidia-h200.jsonl" for root in roots]
    monkeypatch.setenv("DSAGEN_CHOICE_TABLE", "none")
    assert read_tables() == ChoiceTables()


def test_the_first_row_that_covers_a_shape_decides():
    other = replace(ROW, tokens=(1, 1), num_splits=16)
    assert decide(other, ROW, replace(ROW, num_splits=8)).row.num_splits == 32
    for shape in (
        DecodeShape(1, 1, 16, 2048), DecodeShape(5, 1, 16, 2048), DecodeShape(3, 1, 8, 2048),
        DecodeShape(3, 1, 16, 1024), DecodeShape(3, 1, 16, 2048, 128), DecodeShape(3, 1, 16, 2048, 0, 2),
    ):  # fmt: skip
        assert decide(ROW, shape=shape).row is None
    assert decide(ROW, shape=DecodeShape(1, 3, 16, 2048)).row is not None


def test_a_row_is_taken_with_its_splits_and_explained():
    found = judged(decide(ROW))
    chosen = choose(found)
    assert (chosen.plan, chosen.partition.num_splits, chosen.partition.untuned) == (HOPPER, 32, False)
    assert [candidate.plan for candidate in found] == [HOPPER, HOPPER, PORTABLE]
    text = explain_choice(found, SHAPE, decide(ROW))
    assert f"chosen: {HOPPER.slug}" in text and "splits: measured (table.jsonl:1)\n" in text
    assert (
        "choice table: table.jsonl:1: 6.50 us by 32 splits in two launches on NVIDIA H200, driver 580.159.04, nvcc "
        f"13.0.88, 2026-12-01; 11.40 us by 32 splits in two launches with {PORTABLE.slug}"
    ) in text


def test_a_row_may_choose_the_portable_body():
    row = replace(ROW, kernel=PORTABLE.slug, text=text_of(PORTABLE))
    chosen = choose(judged(decide(row)))
    assert (chosen.plan, chosen.row.kernel, chosen.partition.num_splits) == (PORTABLE, PORTABLE.slug, 32)


def test_without_a_row_the_preferred_body_is_taken():
    chosen = choose(judged(decide()))
    assert chosen.plan == HOPPER and chosen.partition.untuned


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        (ROW, {"device": "NVIDIA H100"}, "measured on NVIDIA H200, this is NVIDIA H100"),
        (replace(ROW, text="older"), {}, f"measured with another text of {HOPPER.slug}: run `dsagen tune` again"),
        (replace(ROW, kernel=HOPPER.slug.replace("sm_90a", "sm_100a")), {}, "measured on sm_100a, this is sm_90a"),
        (ROW, {"plans": (PORTABLE,)}, f"{HOPPER.slug} is not among these kernels (DSAGEN_SPARSE_DECODE_BODY, or a "),
        (ROW, {"determinism": "batch_invariant"}, "batch-invariant specs take neither kernel nor splits"),
    ],
)  # fmt: skip
def test_rows_that_do_not_count_are_left_out_with_a_reason(row, options, reason):
    decision = decide(row, **options)
    assert decision.row is None
    (ignored,) = decision.ignored
    assert ignored.startswith(f"table.jsonl:1: {reason}")
    assert f"choice table: not taken: {ignored}" in explain_choice(judged(decision), SHAPE, decision)
    # A later row may count.
    assert decide(row, replace(ROW, num_splits=9), **options).row == (
        replace(ROW, num_splits=9, place="table.jsonl:2") if not options else None
    )


def test_a_row_whose_splits_do_not_fit_is_refused_and_said():
    found = judged(decide(replace(ROW, num_splits=33)))
    assert choose(found) is found[1] and found[1].row is None
    assert "[SD-04]" in found[0].refusals[0]


def test_given_splits_override_a_row_s():
    chosen = choose(judged(decide(replace(ROW, launches=1)), num_splits=5))
    assert (chosen.plan, chosen.partition.num_splits, chosen.partition.one_launch) == (HOPPER, 5, False)
    assert chosen.partition.why == "given by the caller"


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_one_launch_is_for_splits_that_can_be_a_cluster(splits):
    two = replace(ROW, num_splits=splits)
    one = replace(two, launches=1)
    part = choose(judged(decide(one))).partition
    assert (part.one_launch, part.cluster, part.main_ctas) == (True, splits, 3 * splits)
    assert (part.combine_ctas, part.workspace_bytes) == (0, 0)
    part = choose(judged(decide(one), launches=2)).partition
    assert (part.one_launch, part.cluster, part.combine_ctas) == (False, 1, 3 * 16) and part.workspace_bytes > 0
    assert choose(judged(decide(two), launches=1)).partition.one_launch


def test_other_splits_take_two_launches():
    found = judged(decide(replace(ROW, launches=1)))
    assert found[0].refusals[0].startswith("[SD-29] one launch: 32 splits (can_join 1): ")
    assert choose(found) is found[1] and found[1].row is None
    # The knob asks where it is possible.
    chosen = choose(judged(decide(ROW), launches=1))
    assert (chosen.plan, chosen.partition.num_splits, chosen.partition.one_launch) == (HOPPER, 32, False)


def test_the_cost_model_joins_two_splits_unless_it_is_told_otherwise():
    def parts(**options: object) -> list[tuple[int, bool]]:
        found = judged(decide(), shape=replace(SHAPE, batch=64), **options)
        return [(c.partition.num_splits, c.partition.one_launch) for c in found]

    assert parts() == [(2, True), (2, False)]
    assert parts(launches=2) == [(2, False), (2, False)]
    assert parts(num_splits=2) == [(2, False), (2, False)]
    assert parts(determinism="batch_invariant") == [(4, False), (4, False)]
    # Rows of 512 columns are split only where that needs no second launch; at 32 four splits are faster.
    for batch, asked, wanted in ((64, None, (2, True)), (64, 2, (1, False)), (32, None, (4, False))):
        shape = replace(SHAPE, batch=batch, topk=512)
        part = judged(decide(), shape=shape, launches=asked)[0].partition
        assert (part.num_splits, part.one_launch) == wanted


def test_only_a_body_that_can_join_is_asked_to():
    row = replace(ROW, kernel=PORTABLE.slug, text=text_of(PORTABLE), num_splits=4, launches=1)
    found = judged(decide(row))
    assert "4 splits (can_join 0)" in found[0].refusals[0]
    assert [c.partition.one_launch for c in judged(decide(), num_splits=4, launches=1)] == [True, False]


def test_splits_of_several_head_groups_are_no_cluster():
    # A token's 40 heads are three CTAs in each split, and splits of one group do not adjoin.
    shape = replace(SHAPE, heads=40)
    found = judged(decide(), shape=shape, num_splits=4, launches=1)
    assert [(c.partition.head_groups, c.partition.one_launch) for c in found] == [(3, False), (3, False)]
    row = replace(ROW, heads=40, num_splits=4, launches=1)
    assert "4 splits (can_join 0)" in judged(decide(row, shape=shape), shape=shape)[0].refusals[0]
    assert all(choice.launches == 2 for choice in choices(shape, (HOPPER,), 132) if choice.num_splits > 1)
    assert any(choice.launches == 1 for choice in choices(SHAPE, (HOPPER,), 132) if choice.num_splits > 1)


def test_explain_and_doctor_show_what_decides_and_what_does_not(table, capsys):
    mine = replace(ROW, text=render(HOPPER).evidence_hash)
    table.write_text("".join(row.to_line() for row in (replace(mine, device="NVIDIA H100"), ROW, mine)))
    assert main(["explain", "v32_h16", "--batch", "3", "--arch", "sm_90a"]) == 0
    told = capsys.readouterr().out
    assert f"chosen: {HOPPER.slug}" in told and f"choice table: {table}:3: 6.50 us" in told
    assert f"choice table: not taken: {table}:1: measured on NVIDIA H100, this is NVIDIA H200" in told
    assert f"choice table: not taken: {table}:2: measured with another text of {HOPPER.slug}" in told
    assert main(["doctor"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"{table}  3 rows" in lines
    assert f"1 not taken: measured with another text of {HOPPER.slug}: run `dsagen tune` again" in lines
    assert "1 not taken: measured on NVIDIA H100, which this machine has not" in lines
    table.write_text("{}")
    assert main(["doctor"]) == 0
    assert f"{table}:1: field kernel: missing" in capsys.readouterr().out
    assert main(["explain", "v32_h16", "--batch", "3"]) == TableError.exit_code


def test_shipped_rows_are_of_today_s_kernels():
    for path in sorted(shipped_folder().glob("*.jsonl")):
        for row in read_table(path):
            slug = parse_slug(row.kernel)
            plan = FAMILY.plan(Variant(slug.family, slug.kernel, slug.body, slug.arch, slug.axes))
            assert render(plan).evidence_hash == row.text, f"{row.place}: measured with another text: tune again"


GOOD = json.loads(ROW.to_line())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_splits": 0}, "field num_splits: 0: expected a whole number from 1 to 2147483647"),
        ({"num_splits": True}, "field num_splits: True: expected a whole number"),
        ({"launches": 3}, "field launches: 3: expected a whole number from 1 to 2"),
        ({"num_splits": 1}, "field launches: 2 with num_splits 1: expected 1, nothing combines"),
        ({"tokens": [4, 2]}, "field tokens: [4, 2]: the first is above the last"),
        ({"tokens": [1]}, "field tokens: [1]: expected [first, last]"),
        ({"topk": [0, 2048]}, "field topk: [0, 2048]: expected a whole number from 1"),
        ({"gpu_us": -1}, "field gpu_us: -1: expected microseconds above 0, at most 1e9"),
        ({"gpu_us": None}, "field gpu_us: None: expected microseconds"),
        ({"device": ""}, "field device: '': expected a line of text"),
        (
            {"kernel": "topk-main-row-sm_90a"},
            "field kernel: 'topk-main-row-sm_90a': expected the slug of a main kernel",
        ),
        ({"kernel": "no slug"}, "field kernel: 'no slug': slug 'no slug': expected family-"),
        ({"beside": [{"kernel": HOPPER.slug}]}, "field [0].num_splits: missing"),
        ({"body": "hopper"}, "field body: unknown; known are kernel, text,"),
    ],
)
def test_what_a_row_may_not_hold_is_told_by_file_field_and_limit(table, changes, message):
    table.write_text(ROW.to_line() + json.dumps({**GOOD, **changes}) + "\n")
    with pytest.raises(TableError) as error:
        read_tables()
    assert str(error.value).startswith(f"{table}:2: ") and message in str(error.value)
    assert str(error.value).endswith("correct it, or unset DSAGEN_CHOICE_TABLE, which names it")


def test_a_table_that_no_variable_names_is_to_be_removed(monkeypatch, tmp_path):
    monkeypatch.delenv("DSAGEN_CHOICE_TABLE", raising=False)
    monkeypatch.setenv("DSAGEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / "h200.jsonl").write_text("{")
    with pytest.raises(TableError, match=r"h200.jsonl:1: no JSON: correct it, remove it, or set DSAGEN_CHOICE_TABLE$"):
        read_tables()


def test_files_that_are_no_tables(table):
    with pytest.raises(TableError, match="no such choice table: correct it, or unset DSAGEN_CHOICE_TABLE, which names"):
        read_tables()
    table.mkdir()
    with pytest.raises(
        TableError, match="is no regular file: correct it, or unset DSAGEN_CHOICE_TABLE, which names it"
    ):
        read_tables()
    table.rmdir()
    table.write_bytes(b"\xff")
    with pytest.raises(TableError, match="byte 0 is no UTF-8"):
        read_tables()
    table.write_text("[1]\n")
    with pytest.raises(TableError, match=r":1: a row: expected an object, found \[1\]"):
        read_tables()
    table.write_text("{")
    with pytest.raises(TableError, match=":1: no JSON"):
        read_tables()
    table.write_text(json.dumps({name: value for name, value in GOOD.items() if name != "heads"}))
    with pytest.raises(TableError, match="field heads: missing"):
        read_tables()
