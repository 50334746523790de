"""Limits that hold for every kernel, whatever its family: of a compile, of a load, and of what a call brings.

Numbers are guards. What a call brings can also be of the wrong kind, which no expression over integers says: those
refusals begin with an id of `CALL_RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsagen.guard import Guard

# `performance_messages` counts them; `symbol` and `first_message` are for the text only.
BUILD_GUARDS: tuple[Guard, ...] = (
    Guard(
        "B-01",
        "build",
        "stack_bytes <= allow_spill_bytes and spill_store_bytes <= allow_spill_bytes "
        "and spill_load_bytes <= allow_spill_bytes",
        "{symbol} spills: {stack_bytes} bytes stack frame, {spill_store_bytes} bytes spill stores, {spill_load_bytes} "
        "bytes spill loads per thread at {registers} registers; the plan allows {allow_spill_bytes} "
        "(allow_spill_bytes)",
    ),
    Guard(
        "B-02",
        "build",
        "performance_messages == 0",
        "{symbol} compiled with what ptxas reports as lost performance: {first_message}",
    ),
    Guard(
        "B-03",
        "build",
        "registers <= registers_cap",
        "{symbol} takes {registers} registers a thread, its plan allows {registers_cap}: use another nvcc, or drop "
        "flags that raise registers",
    ),
    Guard(
        "B-04",
        "build",
        "moves_registers == 0 or registers == registers_cap",
        "{symbol} takes {registers} registers a thread and moves registers between warps, which the plan reckons from "
        "exactly {registers_cap}: with fewer, the last warps to ask would wait forever. Use another nvcc, or drop "
        "flags that change registers",
    ),
)

LOAD_GUARDS: tuple[Guard, ...] = (
    Guard(
        "L-01",
        "load",
        "registers <= registers_cap",
        "loaded kernel uses {registers} registers a thread, its plan allows {registers_cap}: the store entry is not "
        "what was planned; rebuild it with `dsagen build --force`",
    ),
    Guard(
        "L-02",
        "load",
        "local_bytes == 0",
        "loaded kernel keeps {local_bytes} B a thread in local memory, its plan none: it spills; rebuild it with "
        "`dsagen build --force`",
    ),
    Guard(
        "L-03",
        "load",
        "threads <= max_threads",
        "loaded kernel runs with at most {max_threads} threads a block, its plan needs {threads}: rebuild it with "
        "`dsagen build --force`",
    ),
    Guard(
        "L-04",
        "load",
        "static_smem_bytes == 0",
        "loaded kernel has {static_smem_bytes} B of static shared memory, its plan none: rebuild it with "
        "`dsagen build --force`",
    ),
    Guard(
        "L-05",
        "load",
        "smem_bytes <= device_smem_bytes",
        "kernel needs {smem_bytes} B of shared memory, this device gives a block {device_smem_bytes} B: build for the "
        "arch of this device",
    ),
    Guard(
        "L-06",
        "load",
        "moves_registers == 0 or registers == registers_cap",
        "loaded kernel has {registers} registers a thread and moves registers between warps, which its plan reckons "
        "from exactly {registers_cap}: it would wait forever; rebuild it with `dsagen build --force`",
    ),
)

CALL_RULES: Mapping[str, str] = {
    "T-01": "a tensor is a plain torch.Tensor or Parameter: no subclass, no FakeTensor, nothing else",
    "T-02": "no tensor requires grad: the ops have no backward",
    "T-03": "q (scores of topk, the first tensor of a cache op) is on a CUDA device (with device='emulator' on the "
    "CPU) and every other tensor on the same one, a workspace on its plan's",
    "T-04": "a tensor has the dtype that the op, or the spec's KV format, gives it",
    "T-05": "a tensor has the op's number of dims",
    "T-06": "dims that the spec or another tensor fixes have that size",
    "T-07": "the last dim of every tensor is contiguous, but for topk_length and lse",
    "T-08": "elements of an output share memory neither with each other nor with another tensor",
    "T-09": "a plan was made by these kernels, for the batch, s_q, topk and device of the tensors",
    "T-10": "a plan is launched on one stream, until it is bound anew",
    "T-11": "an op is one that the spec declares",
    "T-12": "sizes, k, num_splits and the emulator's seed and threads are whole numbers, drop_neg_inf is a bool, "
    "softmax_scale is a finite fp32 number, device names one, emulator is EmulatorOptions",
    "T-13": "DSAGEN_CHECK_INDICES, which waits for the device, is not set during CUDA graph capture",
    "T-14": "a tensor's values lie in strided memory as they are: no sparse or nested layout, no freed storage, no "
    "transform of torch around it, no negation that is still to be done",
    "T-15": "topk takes page_table or candidate_blocks, and page_size, table_of_row and table_starts with page_table",
    "T-16": "explain takes what calls of the op depend on: of topk, indexer_logits and decode_step the width of a row",
    "T-17": "a cache op has the tensors that its format and its other arguments ask for: kpe_cache where rotary dims "
    "and v_cache where values have their own, k_pe where there are any, slots or a block table, slots of both pools or "
    "of neither, codes and scales or neither; a second cache, and width of its lists, where the spec declares one",
    "T-18": "on the emulator a launch has at most DSAGEN_EMULATOR_MOST_CTAS CTAs",
    "T-19": "the kernels whose handle an op of torch takes are loaded in this process",
    "T-20": "a drop-in module is given only what the ops can honour",
    "T-21": "indexer_logits takes max_seq_len or out",
    "T-22": "the stages of decode_step fit each other: sizes, pages of both caches, tables, lengths, what is reused, "
    "and the memory lent to its plan",
    "T-23": "scales of q are given exactly where the spec's index keys have scales of blocks",
    "T-24": "a tensor map describes a tensor and a box as the hardware takes them",
}
