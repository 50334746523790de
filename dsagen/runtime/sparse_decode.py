"""The sparse-decode op on torch tensors: what a call must bring, and the plan that launches it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import torch

from dsagen.errors import DsagenError, GuardError
from dsagen.families.sparse_decode.choice import TENSOR_GUARDS, TENSOR_NAMES, check_columns
from dsagen.families.sparse_decode.guards import CLUSTER_GUARD, WORKSPACE_GUARD
from dsagen.families.sparse_decode.op import WORKSPACE_ALIGNMENT_BYTES, DecodePartition
from dsagen.families.sparse_decode.rows import part_segments
from dsagen.guard import check
from dsagen.kv_format import KvFormat
from dsagen.runtime.blocks import Number
from dsagen.runtime.decode_caches import SecondTensors, no_pool_arguments, pool_addresses, pool_arguments
from dsagen.runtime.decode_lists import list_strides, require_lists
from dsagen.runtime.decode_outputs import output_strides
from dsagen.runtime.device_memory import no_memory
from dsagen.runtime.driver import Driver, Operands
from dsagen.runtime.launch import CallForm, OpLaunches, OpRoutes, Step, launch_config
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
    kpe_cache: torch.Tensor | None = None
    extra_k_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None
    extra_kpe_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None
    extra_v_cache: torch.Tensor | None = None

    @property
    def second(self) -> SecondTensors:
        """Of the main cache: the tensors that some formats have beside k_cache."""
        return SecondTensors(self.kpe_cache, self.v_cache)

    @property
    def extra_second(self) -> SecondTensors:
        """The same of the second cache."""
        return SecondTensors(self.extra_kpe_cache, self.extra_v_cache)

    def given(self) -> list[tuple[str, Any]]:
        """Name and tensor of those that the call brings; q, k_cache and indices always."""
        pairs = zip(self._fields, self, strict=True)
        return [(name, tensor) for name, tensor in pairs if tensor is not None or name in _REQUIRED]


# Pointers of the argument blocks, and the tensors that they lead into.
_ADDRESSES: Mapping[str, str | tuple[str, ...]] = {
    **{name: name for name in ("q", "indices", "topk_length", "attn_sink", "out", "lse")},
    **{name: name for name in ("extra_indices", "extra_topk_length")},
    "kv": "k_cache",
    "kv_part": ("kpe_cache", "v_cache", "k_cache"),
    "extra_kv": "extra_k_cache",
    "extra_kv_part": ("extra_kpe_cache", "extra_v_cache", "extra_k_cache"),
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
    extra_topk: int
    device: torch.device
    span_bytes: Mapping[str, int]
    arguments: Mapping[str, Number]


class DecodeBinder:
    """Checks a call's tensors against a spec. Tensors like some that passed before are told by their signatures."""

    def __init__(self, spec: DeploymentSpec, driver: Driver) -> None:
        self._spec, self._driver, self._format = spec, driver, spec.kv_format
        self._extra_format = spec.extra_kv_format
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
        spec, fmt = self._spec, self._format
        require(TensorRule("q", ("bfloat16",), "[batch, s_q, heads, d_qk]", (None, None, None, fmt.d_qk)), t.q)
        batch, s_q, heads = (int(size) for size in t.q.shape[:3])
        require_lists("", t.indices, t.topk_length, (batch, s_q, spec.kv_heads))
        topk = int(t.indices.shape[-1])
        pool = pool_arguments("", fmt, t.k_cache, t.second, spec.kv_heads)
        extra = self._extra_arguments(t, batch, s_q)
        check_columns((topk, int(extra.get("extra_topk", 0))), (spec.topk, spec.extra_topk), TENSOR_NAMES)
        _require_optional(t, batch, s_q, heads, fmt.d_v)

        lists = {**_query_strides(t), **list_strides("", t.indices, t.topk_length)}
        arguments = {**lists, **output_strides(t, batch, s_q, heads, fmt.d_v)}
        values = {
            **arguments,
            "heads": heads,
            "spec_heads": spec.heads,
            "q_address": t.q.data_ptr(),
            "out_address": 0 if t.out is None else t.out.data_ptr(),
        }
        check(TENSOR_GUARDS, values)
        shape = {"s_q": s_q, "heads": heads, "topk": topk}
        spans = {name: span_bytes(tensor) for name, tensor in t.given()}
        fixed = {**spec_arguments(spec), **arguments, **pool, **extra, **shape}
        return Binding(batch, s_q, topk, int(extra.get("extra_topk", 0)), t.q.device, spans, fixed)

    def _extra_arguments(self, t: DecodeTensors, batch: int, s_q: int) -> dict[str, Number]:
        """Arguments of the second cache; none for a spec without one."""
        record, lists = self._extra_format, (t.extra_indices, t.extra_topk_length, *t.extra_second)
        if record is None or t.extra_k_cache is None:
            names = ("extra_k_cache", "extra_indices", "extra_topk_length", "extra_kpe_cache", "extra_v_cache")
            stray = next((n for n, x in zip(names, (t.extra_k_cache, *lists), strict=True) if x is not None), None)
            if stray is not None:
                why = "the spec declares no extra_kv" if record is None else "there is no extra_k_cache"
                raise GuardError(f"[T-17] {stray}: {why}: leave it out, or pass a cache that the spec declares")
            return {} if record is None else _no_extra(record)
        if t.extra_indices is None:
            raise GuardError("[T-17] extra_indices: missing beside extra_k_cache: pass both or neither")
        kv_heads = self._spec.kv_heads
        require_lists("extra_", t.extra_indices, t.extra_topk_length, (batch, s_q, kv_heads))
        return {
            **pool_arguments("extra_", record, t.extra_k_cache, t.extra_second, kv_heads),
            **list_strides("extra_", t.extra_indices, t.extra_topk_length),
            "extra_topk": int(t.extra_indices.shape[-1]),
        }


def _no_extra(record: KvFormat) -> dict[str, Number]:
    """Arguments of a second cache that a call leaves out."""
    names = ["topk", *(f"{what}_stride_{axis}" for what in ("indices", "length") for axis in ("b", "s", "kv"))]
    return {**no_pool_arguments("extra_", bool(part_segments(record))), **{f"extra_{name}": 0 for name in names}}


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
        shape: tuple[int, int, int, int],
        partition: DecodePartition,
        main: LoadedKernel,
        combine: LoadedKernel | None,
        workspace: torch.Tensor | None,
        debug_sync: bool,
        poisons: bool = False,
    ) -> None:
        self.spec = spec
        self.batch, self.s_q, self.topk, self.extra_topk = shape
        self.partition = partition
        self.device = driver.torch_device(main.ordinal)
        self._driver, self._main = driver, main
        self.workspace = self._make_workspace(workspace, partition.workspace_bytes)
        self._lent = self.workspace if workspace is not None else None
        base = self.workspace.data_ptr() if self.workspace is not None else 0
        self._arguments: dict[str, Number] = {
            "num_splits": partition.num_splits,
            "head_groups": partition.head_groups,
            "kv_head_groups": partition.kv_head_groups,
            "group_heads": partition.group_heads,
            "lse_accum": base,
            "o_accum": base + partition.o_accum_offset_bytes if base else 0,
        }
        self._steps = [Step(main, partition.main_ctas, partition.cluster)]
        if partition.one_launch and partition.main_ctas:  # a plan for no tokens launches nothing
            clusters = driver.most_clusters(main.ordinal, main.handle, launch_config(self._steps[0], 0))
            check([CLUSTER_GUARD], {"clusters": clusters, "num_splits": partition.num_splits}, self.main_slug)
        if combine is not None:
            self._steps.append(Step(combine, partition.combine_ctas))
        self._poisons = poisons
        self._launches = OpLaunches(driver, FORM, debug_sync, repeats=not poisons)
        self._launches.hold_stream(None)
        if self._lent is not None:
            self._launches.reserve(self._lent)
        # See OpLaunches; takes the tensors of a call in the order of DecodeTensors, and the scale.
        self.repeat = self._launches.repeat
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
    def slugs(self) -> tuple[str, ...]:
        """Names of a call's kernels, in the order of their launches."""
        return tuple(step.kernel.plan.slug for step in self._steps)

    @property
    def overlaps(self) -> bool:
        """Whether its first launch begins while the one before it on the stream ends."""
        return self._main.plan.overlaps_previous

    @property
    def launches(self) -> int:
        """Kernels of a call."""
        return len(self._steps)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the plan holds between launches."""
        return self.partition.workspace_bytes

    @property
    def stream(self) -> int | None:
        """Raw handle of the stream that the plan belongs to, None before its first launch."""
        return self._stream

    def __repr__(self) -> str:
        extra = f", extra_topk={self.extra_topk}" if self.extra_topk else ""
        return (
            f"SparseDecodePlan(batch={self.batch}, s_q={self.s_q}, topk={self.topk}{extra}, "
            f"kernels={list(self.slugs)}, num_splits={self.num_splits}, launches={self.launches}, "
            f"workspace_bytes={self.workspace_bytes}, overlaps={self.overlaps}, device={str(self.device)!r})"
        )

    def rebind(self) -> None:
        """Let the next launch choose the stream anew; the caller vouches that work on the old one is done."""
        with self._lock:
            self._launches.hold_stream(None)
            self._stream = None

    def prepared_launches(self) -> list[Callable[[Operands], None]]:
        """See `OpLaunches.prepared`."""
        return self._launches.prepared()

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
            advice = "plan a smaller batch or fewer splits"
            raise no_memory("workspace", needed_bytes, self.device, advice, error) from None
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
            ("extra_topk", self.extra_topk, binding.extra_topk),
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
        asked: DecodeTensors,
        softmax_scale: float | None,
        stream: int,
    ) -> None:
        """Launch the op's kernels with the arguments of a binding.

        `tensors` has all outputs, `asked` those that the call brings, `softmax_scale` is as given. GuardError for
        another stream than the plan's.
        """
        scale = self.spec.sm_scale if softmax_scale is None else require_scale(softmax_scale)
        values = {**self._arguments, **bound, **call_arguments(self.spec, tensors, scale)}
        with self._lock:
            if stream != self._stream:
                self._bind(stream)
            if self._poisons and self.workspace is not None:
                # All ones is a NaN.
                self.workspace.fill_(255)
            operands: Operands = (*tensors, self.workspace)
            call = (*tensors, softmax_scale)
            self._launches.launch(self._steps, stream, values, operands, call, (*asked, softmax_scale))

    def serve(self, routes: OpRoutes, call: tuple[Any, ...]) -> None:
        """Let calls without a plan that are like one of mine come to me; `call` is as the routes take it."""
        routes.add(call, self._launches, self)

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


def call_arguments(spec: DeploymentSpec, t: DecodeTensors, softmax_scale: float) -> dict[str, Number]:
    """The arguments that change from call to call: addresses and the scale. `t` has all outputs."""
    names = ("q", "indices", "topk_length", "attn_sink", "out", "lse")
    arguments: dict[str, Number] = {"scale_log2": softmax_scale * _LOG2_E}
    arguments |= {name: _address(getattr(t, name)) for name in names}
    arguments |= pool_addresses("", spec.kv_format, t.k_cache, t.second)
    extra = spec.extra_kv_format
    if extra is not None:
        arguments["extra_indices"] = _address(t.extra_indices)
        arguments["extra_topk_length"] = _address(t.extra_topk_length)
        if t.extra_k_cache is not None:
            arguments |= pool_addresses("extra_", extra, t.extra_k_cache, t.extra_second)
    return arguments


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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


def _require_optional(t: DecodeTensors, batch: int, s_q: int, heads: int, d_v: int) -> None:
    if t.attn_sink is not None:
        require(TensorRule("attn_sink", ("float32",), "[heads]", (heads,)), t.attn_sink)
    if t.out is not None:
        require(TensorRule("out", ("bfloat16",), "[batch, s_q, heads, d_v]", (batch, s_q, heads, d_v)), t.out)
        require_separate_elements("out", t.out)
    if t.lse is not None:
        rule = TensorRule("lse", ("float32",), "[batch, heads, s_q]", (batch, heads, s_q), last_dim_contiguous=False)
        require(rule, t.lse)
        require_separate_elements("lse", t.lse)


def _query_strides(t: DecodeTensors) -> dict[str, int]:
    return dict(zip(("q_stride_b", "q_stride_s", "q_stride_h"), free_strides(t.q), strict=False))
