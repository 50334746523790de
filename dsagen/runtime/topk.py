"""The top-k op on torch tensors: what a call must bring, and its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.topk.guards import (
    ID_GUARD,
    PAGE_GUARD,
    TABLE_GUARD,
    TABLE_REACH_GUARD,
    TABLE_ROW_GUARD,
    WINDOW_GUARD,
)
from dsagen.families.topk.op import CANDIDATE_BLOCK, SIZE_GUARDS, TopkShape, most_lead
from dsagen.guard import check, require_int
from dsagen.runtime.blocks import Number
from dsagen.runtime.device_memory import new_output
from dsagen.runtime.driver import Driver
from dsagen.runtime.launch import CallForm
from dsagen.runtime.tensors import (
    TensorRule,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    require_separate_elements,
    require_served,
    span_bytes,
)
from dsagen.spec import DeploymentSpec

OP = "topk"
_OUTPUTS = frozenset({"out", "raw", "counts"})
_PER_ROW = ("lengths", "starts", "offsets", "table_of_row", "table_starts")
_TORCH_SCORES = {"fp32": "float32", "bf16": "bfloat16"}


class TopkTensors(NamedTuple):
    """The tensors of one call; all but scores may be None. `page_table` stands for candidate blocks as well."""

    scores: torch.Tensor
    lengths: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    table_of_row: torch.Tensor | None = None
    table_starts: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    out: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    def given(self, table_name: str = "page_table") -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings, the table by the name that it was given by; scores always."""
        names = (table_name if name == "page_table" else name for name in self._fields)
        pairs = zip(names, self, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None or name == "scores"]


# Pointers of the argument block that lead into tensors of the call have their names. Its scalars are k, page_size,
# drop_neg_inf and determinism as given, and whether page_table stands for candidate blocks.
FORM = CallForm(
    OP,
    TopkTensors._fields,
    _OUTPUTS,
    5,
    {name: name for name in TopkTensors._fields},
    frozenset({"histograms", "counters", "lists"}),
)


class TopkOptions(NamedTuple):
    """The numbers of one call."""

    k: int
    page_size: int
    drop_neg_inf: bool
    ordered: bool = True
    # Under which of its names the call has a table.
    table_name: str = "page_table"


def table_and_page_size(
    page_table: torch.Tensor | None, candidate_blocks: torch.Tensor | None, page_size: int | None, with_table: bool
) -> tuple[torch.Tensor | None, int]:
    """The one table of a call and its page size; candidate blocks are pages of 8, a table row for each row.

    `with_table` says that table_of_row or table_starts is given. GuardError for what does not go together.
    """
    if page_table is not None and candidate_blocks is not None:
        raise GuardError("[T-15] candidate_blocks: given with page_table, and an index goes through one: drop either")
    if page_table is None and (page_size is not None or with_table):
        raise GuardError("[T-15] page_size, table_of_row, table_starts: nothing reads them without page_table: pass it")
    if candidate_blocks is not None:
        return candidate_blocks, CANDIDATE_BLOCK
    return page_table, 1 if page_size is None else require_int("page_size", page_size)


def bind(t: TopkTensors, options: TopkOptions, spec: DeploymentSpec, driver: Driver) -> dict[str, Number]:
    """The arguments of a call but for the outputs' addresses; GuardError for the first thing that does not fit."""
    given = t.given(options.table_name)
    for name, tensor in given:
        require_plain(name, tensor)
    require_served("scores", t.scores, driver)
    for name, tensor in given:
        require_device(name, tensor, t.scores.device, "scores")
        require_memory(name, tensor)
    assert spec.scores is not None
    require(TensorRule("scores", (_TORCH_SCORES[spec.scores],), "[rows, width]", (None, None)), t.scores)
    rows, width = (int(size) for size in t.scores.shape)
    check(SIZE_GUARDS, shape_of(t, options.k, spec).values)
    check([PAGE_GUARD], {"page_size": options.page_size})
    _require_rest(t, rows, options)
    require_no_overlap(_OUTPUTS, given, {name: span_bytes(tensor) for name, tensor in given})
    multiplier, shift = page_divisor(options.page_size)
    return {
        "rows": rows,
        "width": width,
        "k": options.k,
        "ordered": int(options.ordered),
        "drops_neg_inf": int(options.drop_neg_inf),
        "page_size": options.page_size,
        "page_multiplier": multiplier,
        "page_shift": shift,
        "scores": t.scores.data_ptr(),
        "row_stride": t.scores.stride(0) if rows > 1 else 0,
        **{name: _address(getattr(t, name)) for name in _PER_ROW},
        **_table_arguments(t.page_table),
    }


DETERMINISM = ("off", "set", "order")


def require_determinism(value: object) -> bool:
    """Whether slots must follow the indices; GuardError for no mode of `DETERMINISM`."""
    if not isinstance(value, str) or value not in DETERMINISM:
        raise GuardError(f"[T-12] determinism: expected one of {', '.join(DETERMINISM)}, found {value!r}")
    return value == "order"


def shape_of(t: TopkTensors, k: int, spec: DeploymentSpec) -> TopkShape:
    """The sizes that choose a kernel."""
    rows, width = (int(size) for size in t.scores.shape)
    aligned = (t.scores.data_ptr() | (t.scores.stride(0) * t.scores.element_size() if rows > 1 else 0)) % 16 == 0
    assert spec.scores is not None
    lead = 0 if aligned and t.starts is None else most_lead(spec.scores)
    return TopkShape(rows, width, k, spec.most_selected, lead)


def output_arguments(t: TopkTensors, out: torch.Tensor) -> dict[str, Number]:
    """Where a call writes."""
    return {
        "out": out.data_ptr(),
        "out_stride": out.stride(0) if out.shape[0] > 1 else 0,
        "raw": _address(t.raw),
        "raw_stride": 0 if t.raw is None or t.raw.shape[0] == 1 else t.raw.stride(0),
        "counts": _address(t.counts),
    }


def make_output(t: TopkTensors, k: int) -> torch.Tensor:
    """The ids' destination as given, or new: int32 [rows, k]."""
    if t.out is not None:
        return t.out
    return new_output("out", (t.scores.shape[0], k), torch.int32, t.scores.device)


def check_windows(t: TopkTensors) -> None:
    """Refuse windows that leave their row; a negative length is an empty window. Waits for the device."""
    rows, width = t.scores.shape
    starts = torch.zeros(rows, dtype=torch.int64, device=t.scores.device) if t.starts is None else t.starts.long()
    lengths = width - starts if t.lengths is None else t.lengths.long()
    bad = (starts < 0) | (starts > width) | (lengths > width - starts)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        values = {"start": int(starts[row]), "length": int(lengths[row]), "width": int(width)}
        check([WINDOW_GUARD], values, row=row, count=int(bad.sum()))


def check_tables(t: TopkTensors, options: TopkOptions) -> None:
    """Refuse ids that tables and offsets would not give, of whatever element is selected. Waits for the device.

    Rows without elements read no table, and a negative page is padding, whose ids are -1. Windows were checked.
    """
    rows, width = t.scores.shape
    lengths = torch.full((rows,), width, dtype=torch.int64, device=t.scores.device)
    if t.starts is not None:
        lengths -= t.starts.long()
    if t.lengths is not None:
        lengths = t.lengths.long().clamp(min=0)
    if t.page_table is None:
        most, least = lengths - 1, torch.zeros_like(lengths)
    else:
        least, most = _table_ids(t, options, lengths)
    if t.offsets is not None:
        least, most = least + t.offsets.long(), most + t.offsets.long()
    # Without an element, or with padding alone, most is below least.
    name = "offsets" if t.page_table is None else options.table_name
    bad = (most >= least) & ((least < 0) | (most >= 1 << 31))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        values = {"least": int(least[row]), "most": int(most[row])}
        check([ID_GUARD], values, name=name, row=row, count=int(bad.sum()))


def _table_ids(t: TopkTensors, options: TopkOptions, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest id of each row's window, before offsets; GuardError for what its table has not."""
    assert t.page_table is not None
    (tables, columns), device, size = t.page_table.shape, t.scores.device, options.page_size
    live = lengths > 0
    table = torch.arange(lengths.numel(), device=device) if t.table_of_row is None else t.table_of_row.long()
    bad = live & ((table < 0) | (table >= tables))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        check([TABLE_ROW_GUARD], {"table_row": int(table[row]), "tables": tables}, row=row, count=int(bad.sum()))
    first = torch.zeros_like(lengths) if t.table_starts is None else t.table_starts.long()
    entries = (lengths + size - 1) // size
    bad = live & ((first < 0) | (first + entries > columns))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        values = {"start": int(first[row]), "entries": int(entries[row]), "columns": columns}
        check([TABLE_REACH_GUARD], values, name=options.table_name, row=row, count=int(bad.sum()))
    least, most = torch.full_like(lengths, 1 << 62), torch.full_like(lengths, -1)
    if not bool(live.any()):
        return least, most
    pages = t.page_table.long()[torch.where(live, table, 0)]
    entry = torch.arange(columns, device=device) - first[:, None]
    read = (entry >= 0) & (entry < torch.where(live, entries, 0)[:, None]) & (pages >= 0)
    # The last page of a window may not be read to its end.
    slots = (lengths[:, None] - entry * size).clamp(max=size)
    least = torch.where(read, pages * size, least[:, None]).amin(1)
    return least, torch.where(read, pages * size + slots - 1, most[:, None]).amax(1)


def _require_rest(t: TopkTensors, rows: int, options: TopkOptions) -> None:
    k = options.k
    for name in _PER_ROW:
        tensor = getattr(t, name)
        if tensor is not None:
            require(TensorRule(name, ("int32",), "[rows]", (rows,)), tensor)
    if t.page_table is not None:
        # A row without a table of its own would read another's.
        table_rows = rows if t.table_of_row is None else None
        layout = "[rows, pages]" if t.table_of_row is None else "[tables, pages]"
        if options.table_name == "candidate_blocks":
            layout = "[rows, blocks]"
        require(TensorRule(options.table_name, ("int32",), layout, (table_rows, None)), t.page_table)
        sizes = {"table_rows": t.page_table.shape[0], "table_columns": t.page_table.shape[1]}
        check([TABLE_GUARD], sizes, name=options.table_name)
    for name, tensor, layout, shape in (
        ("out", t.out, "[rows, k]", (rows, k)),
        ("raw", t.raw, "[rows, k]", (rows, k)),
        ("counts", t.counts, "[rows]", (rows,)),
    ):
        if tensor is not None:
            require(TensorRule(name, ("int32",), layout, shape), tensor)
            require_separate_elements(name, tensor)


def _table_arguments(table: torch.Tensor | None) -> dict[str, Number]:
    if table is None:
        return {"page_table": 0, "table_stride": 0, "table_rows": 0, "table_columns": 0}
    rows, columns = table.shape
    # An empty table has no address, and a null one would mean that there is none.
    address = table.data_ptr() or 1
    return {"page_table": address, "table_stride": table.stride(0), "table_rows": rows, "table_columns": columns}


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
