"""The sparse-decode op on torch tensors: what a call must bring, and the plan that launches it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dsagen.division import page_divisor
from dsagen.errors import DeviceError, DsagenError, GuardError
from dsagen.families.sparse_decode.choice import TENSOR_GUARDS
from dsagen.families.sparse_decode.guards import INDEX_GUARD, LENGTH_GUARD, WORKSPACE_GUARD
from dsagen.families.sparse_decode.op import WORKSPACE_ALIGNMENT_BYTES, DecodePartition
from dsagen.guard import check
from dsagen.runtime.blocks import Number
from dsagen.runtime.driver import Driver, Operands
from dsagen.runtime.launch import CallForm, OpLaunches, Step
from dsagen.runtime.loader import LoadedKernel
from dsagen.runtime.tensors import (
    TensorRule,
    free_strides,
    require,
    require_device,
    require_memory,
    require_no_overlap,
    require_plain,
    require_separate_elements,
    require_served,
    signature,
    span_bytes,
)
from dsagen.spec import DeploymentSpec

OP = "sparse_decode"
_REQUIRED = frozenset({"q", "k_cache", "indices"})
_OUTPUTS = frozenset({"out", "lse"})
_LOG2_E = 1.4426950408889634
_FP32_MAX = 3.4028234663852886e38
# Signatures remembered; a serving process has a handful.
_MAX_BINDINGS = 256


class DecodeTensors(NamedTuple):
    """The tensors of one call; optional ones may be None."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings; q, k_cache and indices always."""
        pairs = zip(self._fields, self, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None or name in _REQUIRED]


# Pointers of the argument blocks, and the tensors that they lead into.
_ADDRESSES = {
    "q": "q",
    "kv": "k_cache",
    "indices": "indices",
    "topk_length": "topk_length",
    "attn_sink": "attn_sink",
    "out": "out",
    "lse": "lse",
}
# A call is its tensors and the softmax scale, as given.
FORM = CallForm(OP, DecodeTensors._fields, _OUTPUTS, 1, _ADDRESSES, frozenset({"lse_accum", "o_accum"}))


@dataclass(frozen=True)
class Binding:
    """What checked tensors say: shape, device, and every argument that follows from spec, shapes and strides.

    `span_bytes` is, by tensor name, from its first byte to the end of its last element.
    """

    batch: int
    s_q: int
    topk: int
    device: torch.device
    span_bytes: Mapping[str, int]
    arguments: Mapping[str, Number]


class DecodeBinder:
    """Checks a call's tensors against a spec. Tensors like some that passed before are told by their signatures."""

    def __init__(self, spec: DeploymentSpec, driver: Driver) -> None:
        self._spec, self._driver, self._format = spec, driver, spec.kv_format
        self._bindings: dict[object, Binding] = {}

    def bind(self, tensors: DecodeTensors) -> Binding:
        """The binding of these tensors; GuardError for the first that is not as the op needs it."""
        given = tensors.given()
        for name, tensor in given:
            require_plain(name, tensor)
        try:
            key = tuple([signature(tensor) for tensor in tensors])
        except RuntimeError:
            for name, tensor in given:
                require_memory(name, tensor)
            raise
        found = self._bindings.get(key)
        if found is None:
            found = self._check(tensors)
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings.clear()
            self._bindings[key] = found
        if tensors.out is not None or tensors.lse is not None:
            require_no_overlap(_OUTPUTS, given, found.span_bytes)
        return found

    def _check(self, t: DecodeTensors) -> Binding:
        require_served("q", t.q, self._driver)
        for name, tensor in t.given():
            require_device(name, tensor, t.q.device, "q")
            require_memory(name, tensor)
        spec, fmt, cache = self._spec, self._format, self._format.cache_tensor()
        require(TensorRule("q", ("bfloat16",), "[batch, s_q, heads, d_qk]", (None, None, None, fmt.d_qk)), t.q)
        batch, s_q, heads = (int(size) for size in t.q.shape[:3])
        require(TensorRule("indices", ("int32",), "[batch, s_q, topk]", (batch, s_q, None)), t.indices)
        topk = int(t.indices.shape[2])
        columns = f"[pages, page_size, 1, columns of KV format {fmt.format_id}]"
        require(TensorRule("k_cache", cache.dtypes, columns, (None, None, 1, cache.columns)), t.k_cache)
        _require_optional(t, batch, s_q, heads, fmt.d_v)

        arguments = {**_input_strides(t), **_output_strides(t, batch, s_q, heads, fmt.d_v), **self._pages(t.k_cache)}
        values = {
            **arguments,
            "heads": heads,
            "spec_heads": spec.heads,
            "topk": topk,
            "topk_capacity": spec.topk,
            "io_row_stride_bytes": cache.io_stride_bytes,
            "page_bytes": fmt.page_bytes(arguments["page_size"]),
            "q_address": t.q.data_ptr(),
            "k_cache_address": t.k_cache.data_ptr(),
            "out_address": 0 if t.out is None else t.out.data_ptr(),
        }
        check(TENSOR_GUARDS, values)
        multiplier, shift = page_divisor(arguments["page_size"])
        shape = {"s_q": s_q, "heads": heads, "topk": topk, "page_multiplier": multiplier, "page_shift": shift}
        spans = {name: span_bytes(tensor) for name, tensor in t.given()}
        return Binding(batch, s_q, topk, t.q.device, spans, {**spec_arguments(spec), **arguments, **shape})

    def _pages(self, k_cache: torch.Tensor) -> dict[str, int]:
        """Geometry of the pool. Strides of a single page, or of one-token pages, are what they would be."""
        pages, page_size = int(k_cache.shape[0]), int(k_cache.shape[1])
        page_stride_bytes, row_stride_bytes = (stride * k_cache.element_size() for stride in k_cache.stride()[:2])
        return {
            "pages": pages,
            "page_size": page_size,
            "pool_tokens": pages * page_size,
            "page_stride_bytes": page_stride_bytes if pages > 1 else self._format.page_bytes(page_size),
            "row_stride_bytes": row_stride_bytes if page_size > 1 else self._format.io_stride_bytes,
        }


class SparseDecodePlan:
    """How calls of one shape run on one device: kernels, partition and workspace; never length values.

    Made by `Kernels.plan_sparse_decode`. The workspace's address never changes, so a captured CUDA graph may hold it;
    the plan must then outlive the graph. A plan belongs to the stream of its first launch, since its workspace cannot
    serve two calls at once: a launch on another stream is an error until `rebind()`.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        driver: Driver,
        shape: tuple[int, int, int],
        partition: DecodePartition,
        main: LoadedKernel,
        combine: LoadedKernel | None,
        workspace: torch.Tensor | None,
        debug_sync: bool,
        poisons: bool = False,
    ) -> None:
        self.spec = spec
        self.batch, self.s_q, self.topk = shape
        self.partition = partition
        self.device = driver.torch_device(main.ordinal)
        self._driver, self._main = driver, main
        self.workspace = self._make_workspace(workspace, partition.workspace_bytes)
        self._lent = self.workspace if workspace is not None else None
        base = self.workspace.data_ptr() if self.workspace is not None else 0
        self._arguments: dict[str, Number] = {
            "num_splits": partition.num_splits,
            "head_groups": partition.head_groups,
            "group_heads": partition.group_heads,
            "lse_accum": base,
            "o_accum": base + partition.o_accum_offset_bytes if base else 0,
        }
        grids = (partition.main_ctas, partition.combine_ctas)
        kernels = [kernel for kernel in (main, combine) if kernel is not None]
        self._steps = [Step(kernel, grid) for kernel, grid in zip(kernels, grids, strict=False)]
        self._poisons = poisons
        self._launches = OpLaunches(driver, FORM, debug_sync, repeats=not poisons)
        self._launches.hold_stream(None)
        if self._lent is not None:
            self._launches.reserve(self._lent)
        # See OpLaunches; takes the tensors of a call in the order of DecodeTensors, all outputs given, and the scale.
        self.repeat = self._launches.repeat
        self._hollow_outputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._stream: int | None = None
        self._lock = threading.Lock()

    @property
    def main_slug(self) -> str:
        """Slug of the main kernel that the plan launches."""
        return self._main.plan.slug

    @property
    def num_splits(self) -> int:
        """Splits of each index row; 1 needs neither workspace nor combine."""
        return self.partition.num_splits

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the plan holds between launches."""
        return self.partition.workspace_bytes

    @property
    def stream(self) -> int | None:
        """Raw handle of the stream that the plan belongs to, None before its first launch."""
        return self._stream

    def rebind(self) -> None:
        """Let the next launch choose the stream anew; the caller vouches that work on the old one is done."""
        with self._lock:
            self._launches.hold_stream(None)
            self._stream = None

    def prepared_launches(self) -> list[Callable[[Operands], None]]:
        """See `OpLaunches.prepared`."""
        return self._launches.prepared()

    def new_outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) for a call of the plan's shape, as `make_outputs` makes them."""
        out, lse = self._hollow_outputs
        if out is None or lse is None:
            made = new_outputs(self.batch, self.s_q, self.spec.heads, self.spec.dims.d_v, self.device)
            if all(type(tensor) is torch.Tensor for tensor in made):
                # Of later ones only sizes, strides and dtypes are taken, so these need no memory.
                for tensor in made:
                    tensor.untyped_storage().resize_(0)
                self._hollow_outputs = made
            return new_outputs(self.batch, self.s_q, self.spec.heads, self.spec.dims.d_v, self.device)
        return torch.empty_like(out), torch.empty_like(lse)

    def _make_workspace(self, lent: torch.Tensor | None, needed_bytes: int) -> torch.Tensor | None:
        """The caller's memory, or new; None when none is needed."""
        if lent is None:
            return self._new_workspace(needed_bytes) if needed_bytes else None
        require_plain("workspace", lent)
        require_device("workspace", lent, self.device, "the plan")
        require_memory("workspace", lent)
        require(TensorRule("workspace", ("uint8",), "[bytes]", (None,)), lent)
        given = {"workspace_bytes": lent.numel(), "workspace_address": lent.data_ptr()}
        check([WORKSPACE_GUARD], {**given, "needed_bytes": needed_bytes})
        return lent if needed_bytes else None

    def _new_workspace(self, needed_bytes: int) -> torch.Tensor:
        try:
            # CUDA's allocations begin at such a multiple, those of the CPU need not.
            room = 0 if self.device.type == "cuda" else WORKSPACE_ALIGNMENT_BYTES
            workspace = self._driver.allocate(self._main.ordinal, needed_bytes + room, zero=False)
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU's allocator raises
            raise DeviceError(
                f"workspace: {needed_bytes} B cannot be had on {self.device}: plan a smaller batch or fewer splits "
                f"({str(error).splitlines()[0]})"
            ) from None
        # Under a mode of torch (FakeTensorMode, say) it would be memory in name only; the plan may outlive the mode.
        require_plain("workspace", workspace)
        first = -workspace.data_ptr() % WORKSPACE_ALIGNMENT_BYTES
        return workspace[first : first + needed_bytes]

    def require_shape(self, binding: Binding) -> None:
        """Refuse a call of another shape or device than the plan's."""
        for name, planned, found in (
            ("batch", self.batch, binding.batch),
            ("s_q", self.s_q, binding.s_q),
            ("topk", self.topk, binding.topk),
            ("device", self.device, binding.device),
        ):
            if planned != found:
                raise GuardError(
                    f"[T-09] plan: made for {name} {planned}, the tensors have {name} {found}: make a plan for them "
                    "with plan_sparse_decode"
                )

    def require_apart(self, tensors: DecodeTensors, binding: Binding) -> None:
        """Refuse a call whose tensors lie in the workspace that the caller lent: the kernels write all of it."""
        if self._lent is not None:
            spans = {**binding.span_bytes, "workspace": self.workspace_bytes}
            require_no_overlap({"workspace"}, [("workspace", self._lent), *tensors.given()], spans)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A shallow copy would serve a second stream with the same workspace.
        raise DsagenError(
            "a SparseDecodePlan holds device memory and belongs to one stream, so it is neither copied nor pickled: "
            "make another one with plan_sparse_decode"
        )

    def launch(
        self,
        bound: Mapping[str, Number],
        tensors: DecodeTensors,
        softmax_scale: float | None,
        stream: int,
    ) -> None:
        """Launch the op's kernels with the arguments of a binding; `tensors` has all outputs, `softmax_scale` as given.

        GuardError for another stream than the plan's.
        """
        scale = self.spec.sm_scale if softmax_scale is None else require_scale(softmax_scale)
        values = {**self._arguments, **bound, **call_arguments(tensors, scale)}
        with self._lock:
            if stream != self._stream:
                self._bind(stream)
            if self._poisons and self.workspace is not None:
                # All ones is a NaN.
                self.workspace.fill_(255)
            operands: Operands = (*tensors, self.workspace)
            self._launches.launch(self._steps, stream, values, operands, (*tensors, softmax_scale))

    def _bind(self, stream: int) -> None:
        if self._stream is not None:
            raise GuardError(
                f"[T-10] plan: belongs to stream {self._stream:#x}, the current stream is {stream:#x}: make a plan for "
                "each stream (and for each captured graph), or call plan.rebind() once the other stream's work is done"
            )
        if self.workspace is not None:
            self._driver.keep_for_stream(self._main.ordinal, self.workspace)
        self._stream = stream
        self._launches.hold_stream(stream)


def make_outputs(t: DecodeTensors, d_v: int) -> DecodeTensors:
    """The tensors with out and lse as given, or new: out bf16 [b, s_q, h, d_v], lse fp32 [b, h, s_q]."""
    batch, s_q, heads = t.q.shape[:3]
    out, lse = t.out, t.lse
    if out is None or lse is None:
        new_out, new_lse = new_outputs(batch, s_q, heads, d_v, t.q.device)
        # A mode of torch that is active makes something else of it.
        require_plain("out", new_out)
        out, lse = new_out if out is None else out, new_lse if lse is None else lse
    return t._replace(out=out, lse=lse)


def new_outputs(batch: int, s_q: int, heads: int, d_v: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """New out bf16 [b, s_q, h, d_v], and lse fp32 [b, h, s_q] as a view of [b, s_q, h]."""
    out = torch.empty((batch, s_q, heads, d_v), dtype=torch.bfloat16, device=device)
    return out, torch.empty((batch, s_q, heads), dtype=torch.float32, device=device).transpose(1, 2)


def call_arguments(t: DecodeTensors, softmax_scale: float) -> dict[str, Number]:
    """The arguments that change from call to call: addresses and the scale."""
    found: dict[str, Number] = {"scale_log2": softmax_scale * _LOG2_E}
    for name, source in _ADDRESSES.items():
        tensor = getattr(t, source)
        found[name] = 0 if tensor is None else tensor.data_ptr()
    return found


def spec_arguments(spec: DeploymentSpec) -> dict[str, Number]:
    """The arguments that a spec fixes: the lse's base and its value for a row without tokens."""
    return {
        "lse_unit": 1.0 if spec.lse.base == 2 else math.log(2.0),
        "empty_lse": math.inf if spec.lse.empty == "+inf" else -math.inf,
    }


def require_scale(softmax_scale: object) -> float:
    """The scale as a float; GuardError for what is no finite fp32 number."""
    if not isinstance(softmax_scale, int | float) or isinstance(softmax_scale, bool):
        raise GuardError(f"[T-12] softmax_scale: expected a number, found {type(softmax_scale).__name__}")
    # Compared before anything is computed: an int may be too large for a float, and NaN compares false.
    if not abs(softmax_scale) <= _FP32_MAX / _LOG2_E:
        found = f"an integer of {softmax_scale.bit_length()} bits" if isinstance(softmax_scale, int) else softmax_scale
        raise GuardError(f"[T-12] softmax_scale: {found} is no finite fp32 number: leave it out for the model's")
    return float(softmax_scale)


def check_index_values(t: DecodeTensors) -> None:
    """Refuse lengths outside 0 .. topk, and live ids at or past the pool. Waits for the device.

    Negative ids are padding, and columns at or past topk_length are never read, so both may hold anything.
    """
    topk = int(t.indices.shape[2])
    live = torch.ones_like(t.indices, dtype=torch.bool)
    if t.topk_length is not None:
        bad = (t.topk_length < 0) | (t.topk_length > topk)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            values = {"length": int(t.topk_length[place]), "topk": topk}
            check([LENGTH_GUARD], values, place=list(place), count=int(bad.sum()))
        lengths = t.topk_length.reshape(t.indices.shape[0], -1, 1)
        live = torch.arange(topk, device=t.indices.device) < lengths
    pool_tokens = int(t.k_cache.shape[0] * t.k_cache.shape[1])
    bad = (t.indices >= pool_tokens) & live
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        values = {"token_id": int(t.indices[place]), "pool_tokens": pool_tokens}
        check([INDEX_GUARD], values, place=list(place), count=int(bad.sum()))


def _require_optional(t: DecodeTensors, batch: int, s_q: int, heads: int, d_v: int) -> None:
    if t.topk_length is not None:
        per_token = t.topk_length.dim() == 2
        shape, layout = ((batch, s_q), "[batch, s_q]") if per_token else ((batch,), "[batch] (or [batch, s_q])")
        require(TensorRule("topk_length", ("int32",), layout, shape, last_dim_contiguous=False), t.topk_length)
    if t.attn_sink is not None:
        require(TensorRule("attn_sink", ("float32",), "[heads]", (heads,)), t.attn_sink)
    if t.out is not None:
        require(TensorRule("out", ("bfloat16",), "[batch, s_q, heads, d_v]", (batch, s_q, heads, d_v)), t.out)
        require_separate_elements("out", t.out)
    if t.lse is not None:
        rule = TensorRule("lse", ("float32",), "[batch, heads, s_q]", (batch, heads, s_q), last_dim_contiguous=False)
        require(rule, t.lse)
        require_separate_elements("lse", t.lse)


def _input_strides(t: DecodeTensors) -> dict[str, int]:
    q, indices = free_strides(t.q), free_strides(t.indices)
    length = (0, 0) if t.topk_length is None else (*free_strides(t.topk_length), 0)[:2]
    return {
        "q_stride_b": q[0],
        "q_stride_s": q[1],
        "q_stride_h": q[2],
        "indices_stride_b": indices[0],
        "indices_stride_s": indices[1],
        "length_stride_b": length[0],
        "length_stride_s": length[1],
    }


def _output_strides(t: DecodeTensors, batch: int, s_q: int, heads: int, d_v: int) -> dict[str, int]:
    # What is not given is made as `new_outputs` does.
    new = (
        ((batch, s_q * heads * d_v), (s_q, heads * d_v), (heads, d_v)),
        ((batch, s_q * heads), (heads, 1), (s_q, heads)),
    )
    new_out, new_lse = (tuple(stride if size > 1 else 0 for size, stride in dims) for dims in new)
    out = new_out if t.out is None else free_strides(t.out)
    lse = new_lse if t.lse is None else free_strides(t.lse)
    return {
        "out_stride_b": out[0],
        "out_stride_s": out[1],
        "out_stride_h": out[2],
        "lse_stride_b": lse[0],
        "lse_stride_h": lse[1],
        "lse_stride_s": lse[2],
    }


def _free(strides: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """As `free_strides` gives them for a tensor of these."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(strides, sizes, strict=True))
