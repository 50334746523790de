"""Where cases run: a CUDA device, or the emulator with a declared limit on the size of a case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsagen import knobs
from dsagen.arch import arch_for_capability
from dsagen.check.block_cases import BlockCase
from dsagen.check.candidate_cases import CandidateCase
from dsagen.check.cases import REPEATS as DECODE_REPEATS
from dsagen.check.cases import DecodeCase
from dsagen.check.cases import Probe as DecodeProbe
from dsagen.check.index_cases import REPEATS as INDEX_REPEATS
from dsagen.check.index_cases import IndexCacheCase
from dsagen.check.indexer_cases import REPEATS as LOGITS_REPEATS
from dsagen.check.indexer_cases import LogitsCase
from dsagen.check.indexer_cases import Probe as LogitsProbe
from dsagen.check.kv_cases import REPEATS as KV_REPEATS
from dsagen.check.kv_cases import KvCase
from dsagen.check.kv_cases import Probe as KvProbe
from dsagen.check.ragged_cases import RaggedCase
from dsagen.check.step_cases import REPEATS as STEP_REPEATS
from dsagen.check.step_cases import Probe as StepProbe
from dsagen.check.step_cases import Selects, StepCase
from dsagen.check.topk_cases import FAR_OUT_ELEMENTS, FAR_ROW_ELEMENTS, TopkCase
from dsagen.check.topk_cases import REPEATS as TOPK_REPEATS
from dsagen.check.topk_cases import Probe as TopkProbe
from dsagen.emulator import DEVICE
from dsagen.families.indexer_logits.op import BLOCK_KEYS
from dsagen.index_format import index_format
from dsagen.matrix import expand
from dsagen.runtime.api import load
from dsagen.runtime.emulated import EmulatorOptions
from dsagen.spec import DeploymentSpec

Case = DecodeCase | TopkCase | KvCase | LogitsCase | IndexCacheCase | StepCase | RaggedCase | CandidateCase | BlockCase
# Sizes at which a case takes about a minute of two cores. Larger ones are for devices.
MOST_COLUMN_HEADS = 50_000_000
MOST_SCORES = 50_000_000
MOST_ROW_DIMS = 50_000_000
MOST_KEY_HEADS = 20_000_000
MOST_TENSOR_BYTES = 1 << 30
_SCORE_BYTES, _BF16_BYTES = 4, 2


@dataclass(frozen=True)
class Place:
    """What runs cases: its name in reports, the arch of its kernels, where tensors lie, how kernels are loaded.

    `current` makes the device torch's current one; `refusal` says why a case is too large for it, empty where it is
    not.
    """

    name: str
    arch: str
    device: torch.device
    load: Callable[..., Any]
    current: Callable[[], AbstractContextManager[object]]
    refusal: Callable[[Case], str]


def cuda_place(device: torch.device) -> Place:
    """A CUDA device."""
    arch = arch_for_capability(*torch.cuda.get_device_capability(device)).name
    current = partial(torch.cuda.device, device)
    return Place(torch.cuda.get_device_name(device), arch, device, load, current, lambda case: "")


def emulator_place(spec: DeploymentSpec, arch: str | None, options: EmulatorOptions | None) -> Place:
    """The emulator as one of the spec's archs (the first by default); SpecError for one that it does not declare."""
    chosen = expand(spec, None if arch is None else [arch]).cells[0].arch

    def load_emulated(wanted: DeploymentSpec, device: torch.device) -> Any:
        return load(wanted, device=DEVICE, archs=[chosen], emulator=options)

    return Place(DEVICE, chosen, torch.device("cpu"), load_emulated, nullcontext, partial(too_large, spec))


def too_large(spec: DeploymentSpec, case: Case) -> str:
    """Why a case is beyond what the emulator is meant for, empty where it is not."""
    most_rows = knobs.EMULATOR_MOST_CTAS.get()
    if case.rows > most_rows:
        return (
            f"too large for the emulator: {case.rows:,} rows, and a launch of more than {most_rows:,} CTAs is refused "
            f"({knobs.EMULATOR_MOST_CTAS.name})"
        )
    if isinstance(case, TopkCase):
        what, size, limit, tensor_bytes = _topk_size(case)
    elif isinstance(case, KvCase):
        what, size, limit, tensor_bytes = _kv_size(spec, case)
    elif isinstance(case, LogitsCase):
        what, size, limit, tensor_bytes = _logits_size(spec, case)
    elif isinstance(case, IndexCacheCase):
        what, size, limit, tensor_bytes = _index_size(spec, case)
    elif isinstance(case, StepCase):
        what, size, limit, tensor_bytes = _step_size(spec, case)
    elif isinstance(case, RaggedCase):
        what, size, limit, tensor_bytes = _ragged_size(spec, case)
    elif isinstance(case, BlockCase):
        what, size, limit, tensor_bytes = _logits_size(spec, case.call)
    elif isinstance(case, CandidateCase):
        what, size, limit, tensor_bytes = _candidates_size(spec, case)
    else:
        what, size, limit, tensor_bytes = _decode_size(spec, case)
    if size > limit:
        return f"too large for the emulator: {size:,} {what} over all calls, its limit is {limit:,}"
    if tensor_bytes > MOST_TENSOR_BYTES:
        return f"too large for the emulator: {tensor_bytes:,} bytes of tensors, its limit is {MOST_TENSOR_BYTES:,}"
    return ""


def _decode_size(spec: DeploymentSpec, case: DecodeCase) -> tuple[str, int, int, int]:
    calls = {DecodeProbe.REPEATED: DECODE_REPEATS, DecodeProbe.BATCH_INVARIANT: 3}.get(case.probe, 1)
    record = spec.kv_format
    pool_bytes = case.batch * (case.kv_tokens + case.page_size) * record.record_bytes
    query_bytes = case.rows * spec.heads * _BF16_BYTES * record.d_qk
    if case.extra is not None and spec.extra_kv_format is not None:
        pool_bytes += case.batch * (case.extra.kv_tokens + case.extra.page_size) * spec.extra_kv_format.record_bytes
    size = case.rows * (case.topk + case.extra_topk) * spec.heads * calls
    return "index columns x heads", size, MOST_COLUMN_HEADS, pool_bytes * spec.kv_heads + query_bytes


def _topk_size(case: TopkCase) -> tuple[str, int, int, int]:
    calls = TOPK_REPEATS if case.probe is TopkProbe.REPEATED else 1
    row_bytes = _SCORE_BYTES * (FAR_ROW_ELEMENTS if case.far else case.width)
    output_bytes = _SCORE_BYTES * case.rows * (FAR_OUT_ELEMENTS if case.far_out else case.k)
    return "scores", case.rows * case.width * calls, MOST_SCORES, case.rows * row_bytes + output_bytes


def _kv_size(spec: DeploymentSpec, case: KvCase) -> tuple[str, int, int, int]:
    calls = KV_REPEATS if case.probe is KvProbe.REPEATED else 1
    record = spec.extra_kv_format if case.extra else spec.kv_format
    assert record is not None, "a case is about a cache that the spec has"
    pool_bytes = case.pages * (case.page_size * record.record_bytes + case.pad_bytes)
    return "dims of rows", case.rows * record.d_qk * calls, MOST_ROW_DIMS, pool_bytes


def _index_size(spec: DeploymentSpec, case: IndexCacheCase) -> tuple[str, int, int, int]:
    calls = INDEX_REPEATS if case.probe is KvProbe.REPEATED else 1
    assert spec.index is not None, "a case of the op is for a spec with an index"
    record, dim = index_format(spec.index.keys), spec.index.dim
    pool_bytes = case.pages * (record.page_bytes(dim, case.page_size) + case.pad_bytes)
    return "dims of keys", case.rows * dim * calls, MOST_ROW_DIMS, pool_bytes


def _logits_size(spec: DeploymentSpec, case: LogitsCase) -> tuple[str, int, int, int]:
    calls = {LogitsProbe.REPEATED: LOGITS_REPEATS, LogitsProbe.ALONE: 2}.get(case.probe, 1)
    assert spec.index is not None, "a case of the op is for a spec with an index"
    record, pages = index_format(spec.index.keys), case.batch * -(-case.width // case.page_size)
    pool_bytes = pages * (record.page_bytes(spec.index.dim, case.page_size) + case.pad_bytes)
    heads = case.heads or spec.index.heads
    return "keys x heads", case.rows * case.width * heads * calls, MOST_KEY_HEADS, pool_bytes


def _step_size(spec: DeploymentSpec, case: StepCase) -> tuple[str, int, int, int]:
    calls = STEP_REPEATS if case.probe is StepProbe.REPEATED else 1
    assert spec.index is not None, "a case of the chain is for a spec with an index"
    record, pages = spec.extra_kv_format or spec.kv_format, case.batch * -(-case.width // case.page_size)
    layers = len(case.layers)
    token_bytes = index_format(spec.index.keys).record_bytes(spec.index.dim) + layers * record.record_bytes
    pool_bytes = pages * (case.page_size * token_bytes + case.pad_bytes) * spec.kv_heads
    inside = BLOCK_KEYS * (case.candidate_blocks or 0)
    keys_of = {Selects.ALL: case.width, Selects.CHOOSE: case.width, Selects.USE: inside, Selects.AGAIN: 0}
    scored = sum(keys_of[layer] for layer in case.layers)
    # Attention over a column and a head takes about as long as the score of a key and a head.
    size = case.rows * (scored * spec.index.heads + layers * case.k * spec.heads) * calls
    return "keys and columns x heads", size, MOST_KEY_HEADS, pool_bytes


def _candidates_size(spec: DeploymentSpec, case: CandidateCase) -> tuple[str, int, int, int]:
    what, _, limit, tensor_bytes = _logits_size(spec, case.call)
    calls = {LogitsProbe.REPEATED: LOGITS_REPEATS, LogitsProbe.ALONE: 2}.get(case.probe, 1)
    assert spec.index is not None, "a case of the op is for a spec with an index"
    heads = case.heads or spec.index.heads
    return what, case.call.rows * case.columns * heads * calls, limit, tensor_bytes


def _ragged_size(spec: DeploymentSpec, case: RaggedCase) -> tuple[str, int, int, int]:
    calls = {LogitsProbe.REPEATED: LOGITS_REPEATS, LogitsProbe.ALONE: 2}.get(case.probe, 1)
    assert spec.index is not None, "a case of the op is for a spec with an index"
    tensor_bytes = case.keys * (index_format(spec.index.keys).record_bytes(spec.index.dim) + case.key_gap)
    tensor_bytes += _SCORE_BYTES * case.tokens * case.columns
    heads = case.heads or spec.index.heads
    return "keys x heads", case.tokens * case.keys * heads * calls, MOST_KEY_HEADS, tensor_bytes
