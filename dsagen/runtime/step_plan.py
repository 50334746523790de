"""Plans of decode steps: one workspace, in which indexer, top-k and attention hand on what they made."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import torch
from torch import Tensor

from dsagen.errors import DsagenError, GuardError
from dsagen.runtime.device_memory import no_memory
from dsagen.runtime.driver import Driver
from dsagen.runtime.sparse_decode import SparseDecodePlan
from dsagen.runtime.tensors import TensorRule, require, require_device, require_memory, require_plain
from dsagen.runtime.topk_plan import TopkPlan
from dsagen.spec import DeploymentSpec

if TYPE_CHECKING:
    from dsagen.runtime.step_candidates import CandidateLevel

# Parts of the workspace begin at multiples of what allocations do, which every stage takes.
ALIGNMENT_BYTES = 512
_SCORES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROW_BYTES = 16


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: `next_n` tokens of each of `batch` requests, `k` of up to `max_seq_len` keys for each token."""

    batch: int
    next_n: int
    max_seq_len: int
    k: int

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.batch * self.next_n


@dataclass(frozen=True)
class StepLayout:
    """Where the parts of the workspace lie, in bytes from its begin; `score_columns` is the stride of a row."""

    score_columns: int
    scores: int
    ids: int
    counts: int
    lengths: int
    tables: int
    selection: int
    attention: int
    total_bytes: int


def layout_of(shape: StepShape, scores: str, selection_bytes: int, attention_bytes: int) -> StepLayout:
    """The parts one behind the other, each at a multiple of `ALIGNMENT_BYTES`."""
    item = _SCORES[scores].itemsize
    columns = -(-shape.max_seq_len * item // _ROW_BYTES) * _ROW_BYTES // item
    sizes = [shape.rows * columns * item, 4 * shape.rows * shape.k, *[4 * shape.rows] * 3]
    offsets = [0]
    for size in (*sizes, selection_bytes, attention_bytes):
        offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return StepLayout(columns, *offsets)


class DecodeStepPlan:
    """What all layers of a decode step share on one device, on one stream at a time. Never length values.

    Made by `Kernels.plan_decode_step`. `scores` [rows, max_seq_len] holds the last indexer's scores, `ids` int32
    [batch, next_n, k] what top-k has made of them (then -1), `counts` int32 [batch, next_n] how many; their addresses
    never change, so a captured CUDA graph may hold them; the plan must then outlive the graph. `selection` and
    `attention` are the plans of the stages; `following` is that of attention right behind a selection, which is another
    one where launches overlap and the kernel has a form for that.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        driver: Driver,
        ordinal: int,
        shape: StepShape,
        layout: StepLayout,
        workspace: Tensor,
        stages: tuple[TopkPlan, SparseDecodePlan, SparseDecodePlan],
        determinism: str,
        scoring: str,
        candidates: CandidateLevel | None = None,
    ) -> None:
        self.spec, self.shape, self.determinism = spec, shape, determinism
        self.device = driver.torch_device(ordinal)
        self._driver, self._ordinal = driver, ordinal
        self.workspace = workspace
        self.selection, self.attention, self.following = stages
        rows, per_token = shape.rows, (shape.batch, shape.next_n)
        dtype = _SCORES[str(spec.scores)]

        def part(first: int, dtype: torch.dtype, count: int) -> Tensor:
            return workspace[first : first + count * dtype.itemsize].view(dtype)

        scores = part(layout.scores, dtype, rows * layout.score_columns)
        self.scores = scores.view(rows, layout.score_columns)[:, : shape.max_seq_len]
        self.flat_ids = part(layout.ids, torch.int32, rows * shape.k).view(rows, shape.k)
        self.flat_counts = part(layout.counts, torch.int32, rows)
        self._results = workspace[: layout.lengths]
        self.ids, self.counts = self.flat_ids.view(*per_token, shape.k), self.flat_counts.view(per_token)
        # Where a call has one length for each request, those of its tokens; and the table's row of each token.
        self.token_lengths = part(layout.lengths, torch.int32, rows).view(per_token)
        self.row_tables = part(layout.tables, torch.int32, rows)
        self.behind = torch.arange(shape.next_n - 1, -1, -1, dtype=torch.int32, device=self.device)
        self._set_constants()
        self.has_ids = False
        self._scoring = scoring
        # What layers share of candidate blocks, where the plan is for any.
        self.candidates = candidates
        # Page sizes by the shapes of calls whose stages fit each other: few, since caches and tables keep theirs.
        self.page_sizes: dict[tuple[object, ...], int] = {}
        self._stream: int | None = None
        self._lock = threading.Lock()

    @property
    def slugs(self) -> tuple[str, ...]:
        """Names of a step's kernels without candidate blocks, in the order of their launches."""
        return (self._scoring, *self.selection.slugs, *self.following.slugs)

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}={value}" for name, value in vars(self.shape).items())
        return (
            f"DecodeStepPlan({shape}, kernels={list(self.slugs)}, num_splits={self.following.num_splits}, "
            f"launches={len(self.slugs)}, workspace_bytes={self.workspace_bytes}, overlaps={self.overlaps}, "
            f"device={str(self.device)!r})"
        )

    @property
    def overlaps(self) -> bool:
        """Whether launches of top-k and attention begin while the stage before them ends."""
        return self.selection.is_dependent

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the plan holds between steps."""
        return self.workspace.numel() + (0 if self.candidates is None else self.candidates.memory.numel())

    def poison(self) -> None:
        """Scores become NaN, ids and counts -1: all ones."""
        self._results.fill_(255)

    def claim(self, stream: int) -> None:
        """Bind the plan to a stream, the current one; GuardError when it belongs to another."""
        if stream == self._stream:
            return
        with self._lock:
            if self._stream is not None:
                raise GuardError(
                    f"[T-10] plan: belongs to stream {self._stream:#x}, the current stream is {stream:#x}: make a plan "
                    "for each stream (and for each captured graph), or call plan.rebind() once the other stream's work "
                    "is done"
                )
            self._driver.keep_for_stream(self._ordinal, self.workspace)
            if self.candidates is not None:
                self._driver.keep_for_stream(self._ordinal, self.candidates.memory)
            self._stream = stream

    def rebind(self) -> None:
        """Let the next call choose the stream anew; the caller vouches that work on the old one is done."""
        with self._lock:
            self._stream = None
            self.selection.rebind()
            self.attention.rebind()
            self.following.rebind()
            if self.candidates is not None:
                self.candidates.rebind()

    def _set_constants(self) -> None:
        self.ids.fill_(-1)
        self.counts.zero_()
        numbers = torch.arange(self.shape.rows, dtype=torch.int32, device=self.device)
        self.row_tables.copy_(numbers // self.shape.next_n)
        # The first call may come on another stream than the one that sets them.
        self._driver.synchronize(self._ordinal, self._driver.current_stream(self._ordinal))

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A shallow copy would serve a second stream with the same workspace.
        raise DsagenError(
            "a DecodeStepPlan holds device memory and belongs to one stream, so it is neither copied nor pickled: make "
            "another one with plan_decode_step"
        )


def step_workspace(driver: Driver, ordinal: int, lent: Tensor | None, needed_bytes: int) -> Tensor:
    """The caller's memory, or new, from a multiple of `ALIGNMENT_BYTES`. GuardError for memory that does not do."""
    device = driver.torch_device(ordinal)
    if lent is None:
        return _new_workspace(driver, ordinal, needed_bytes)
    require_plain("workspace", lent)
    require_device("workspace", lent, device, "the plan")
    require_memory("workspace", lent)
    require(TensorRule("workspace", ("uint8",), "[bytes]", (None,)), lent)
    if lent.numel() < needed_bytes or lent.data_ptr() % ALIGNMENT_BYTES:
        raise GuardError(
            f"[T-22] workspace: {lent.numel()} B at {lent.data_ptr():#x}, the plan needs {needed_bytes} B at a "
            f"multiple of {ALIGNMENT_BYTES}: pass what decode_step_workspace_bytes tells, from where an allocation "
            "begins, or none"
        )
    return lent[:needed_bytes]


def _new_workspace(driver: Driver, ordinal: int, needed_bytes: int) -> Tensor:
    try:
        # CUDA's allocations begin at such a multiple, those of the CPU need not.
        memory = driver.allocate(ordinal, needed_bytes + ALIGNMENT_BYTES, zero=False)
    except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU's allocator raises
        advice = "plan a smaller batch, or a max_seq_len that is the batch's and not the model's"
        raise no_memory("workspace", needed_bytes, driver.torch_device(ordinal), advice, error) from None
    # Under a mode of torch (FakeTensorMode, say) it would be memory in name only; the plan may outlive the mode.
    require_plain("workspace", memory)
    first = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[first : first + needed_bytes]
