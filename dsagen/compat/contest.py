"""Two kernels as a contest of 2026 defined them: inputs in its order, outputs returned, or appended to be written.

`run_indexer` is dsa_topk_indexer_fp8_h64_d128_topk2048_ps64, `run_attention`
dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64. `use(kernels)` gives them kernels that are loaded already, of the
specs contest_indexer_h64 and contest_attention_h16; without, those are loaded at the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsagen.compat.decode import refuse
from dsagen.compat.deployments import OpDeployments
from dsagen.compat.selection import require_readable, require_tensor
from dsagen.errors import GuardError
from dsagen.guard import rename
from dsagen.runtime.api import Kernels
from dsagen.runtime.device_memory import new_output
from dsagen.spec import DeploymentSpec, load_spec

__all__ = ["run_attention", "run_indexer", "use"]

TOPK, PAGE_SIZE, HEADS = 2048, 64, 16
LATENT_DIMS, ROTARY_DIMS = 512, 64
_INDEXER_NAMES = {"q": "q_index_fp8", "k_cache": "k_index_cache_fp8", "context_lens": "seq_lens", "out": "topk_indices"}
_ATTENTION_NAMES = {"k_cache": "ckv_cache", "indices": "sparse_indices", "out": "output", "softmax_scale": "sm_scale"}


class _ShippedSpec(OpDeployments[None, None]):
    """Kernels of one shipped spec, whatever its archs and capacity."""

    def __init__(self, op: str, name: str) -> None:
        super().__init__()
        self.op, self._name = op, name

    def load_key(self, call: None) -> None:
        """There is one deployment."""

    def derive(self, wanted: None, arch: str) -> DeploymentSpec:
        """The shipped spec for the arch."""
        return load_spec(self._name).replace(archs=[arch])

    def serves(self, spec: DeploymentSpec, call: None) -> bool:
        """Whether it means what the shipped one does."""
        shipped = load_spec(self._name)
        has_ops = set(shipped.ops) <= set(spec.ops) and spec.extra_kv is None and spec.topk >= shipped.topk
        return has_ops and self._meaning(spec) == self._meaning(shipped)

    def _meaning(self, spec: DeploymentSpec) -> tuple[object, ...]:
        if self.op == "sparse_decode":
            return spec.heads, spec.kv, spec.lse
        # The rules take sums of either kind.
        index = None if spec.index is None else spec.index.model_copy(update={"accumulation": "fast"})
        return index, spec.scores


INDEXER = _ShippedSpec("topk", "contest_indexer_h64")
ATTENTION = _ShippedSpec("sparse_decode", "contest_attention_h16")


def use(kernels: Kernels) -> None:
    """Serve calls with these kernels, of either spec. GuardError for kernels that serve neither."""
    served = [of for of in (INDEXER, ATTENTION) if isinstance(kernels, Kernels) and of.serves(kernels.spec, None)]
    if not served:
        raise GuardError(
            "[T-20] use: kernels: expected what dsagen.load gives for contest_indexer_h64 or contest_attention_h16"
        )
    for deployments in served:
        deployments.use(kernels)


def run_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """topk_indices int32 [batch_size, 2048]: page * 64 + offset of the best keys of each row, then -1.

    q_index_fp8 e4m3 [batch_size, 64, 128]; k_index_cache_fp8 int8 [num_pages, 64, 1, 132]; weights fp32
    [batch_size, 64] with the scales of q in them; seq_lens int32 [batch_size]; block_table int32 [batch_size,
    max_num_pages]. Tables that name no more than 2048 keys need no scores, and others are scored where a row is longer.
    """
    function = "run_indexer"
    for name, tensor, dims in (
        ("q_index_fp8", q_index_fp8, 3), ("k_index_cache_fp8", k_index_cache_fp8, 4), ("weights", weights, 2),
        ("seq_lens", seq_lens, 1), ("block_table", block_table, 2),
    ):  # fmt: skip
        require_tensor(function, name, tensor, dims)
    if k_index_cache_fp8.shape[1] != PAGE_SIZE:
        refuse("k_index_cache_fp8", f"pages of {k_index_cache_fp8.shape[1]} keys, expected {PAGE_SIZE}", function)
    kernels = INDEXER.kernels_for(None, q_index_fp8.device, "q_index_fp8")
    batch, width = int(q_index_fp8.shape[0]), int(block_table.shape[1]) * PAGE_SIZE
    try:
        if width > TOPK:
            scores = kernels.indexer_logits(
                q_index_fp8[:, None], k_index_cache_fp8, weights, seq_lens, block_table, max_seq_len=width,
                unscored_up_to=TOPK,
            )  # fmt: skip
        else:
            scores = new_output("scores", (batch, width), torch.float32, weights.device)
        return kernels.topk(
            scores, k=TOPK, lengths=seq_lens, page_table=block_table, page_size=PAGE_SIZE, out=topk_indices
        )
    except GuardError as error:
        raise rename(error, {**_INDEXER_NAMES, "lengths": "seq_lens", "page_table": "block_table"}) from None


def _number(function: str, name: str, value: Tensor) -> float:
    """The one number that a tensor holds; GuardError for more or fewer, and for what holds none."""
    require_tensor(function, name, value)
    if value.numel() != 1 or value.is_complex():
        found = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        refuse(name, f"{found}: expected a float, or a tensor of one real number", function)
    require_readable(function, name, value, value.device)
    return float(value)


def run_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sparse_indices: Tensor,
    sm_scale: float | Tensor,
    output: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output bf16 [num_tokens, 16, 512], lse fp32 [num_tokens, 16]): base 2, -inf and 0 for a row of -1 alone.

    q_nope bf16 [num_tokens, 16, 512]; q_pe bf16 [num_tokens, 16, 64]; ckv_cache bf16 [num_pages, 64, 512]; kpe_cache
    bf16 [num_pages, 64, 64]; sparse_indices int32 [num_tokens, 2048], physical ids, -1 for none. The two parts of q are
    joined, the caches read as they are. A scale on a device is waited for.
    """
    function = "run_attention"
    for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        require_tensor(function, name, tensor, 3)
    require_tensor(function, "sparse_indices", sparse_indices, 2, q_nope.shape[0])
    for name, tensor, dims in (("q_nope", q_nope, LATENT_DIMS), ("q_pe", q_pe, ROTARY_DIMS)):
        want = (q_nope.shape[0], HEADS, dims)
        if tuple(tensor.shape) != want or tensor.dtype is not torch.bfloat16:
            refuse(name, f"{tensor.dtype} {tuple(tensor.shape)}, expected torch.bfloat16 {tuple(want)}", function)
        # The op sees what they are joined to.
        require_readable(function, name, tensor, q_nope.device)
    for name, given, dims in (("output", output, 3), ("lse", lse, 2)):
        if given is not None:
            require_tensor(function, name, given, dims)
    kernels = ATTENTION.kernels_for(None, q_nope.device, "q_nope")
    scale = _number(function, "sm_scale", sm_scale) if isinstance(sm_scale, Tensor) else sm_scale
    try:
        out, found = kernels.sparse_decode(
            torch.cat((q_nope, q_pe), 2)[:, None], ckv_cache[:, :, None], sparse_indices[:, None],
            kpe_cache=kpe_cache[:, :, None], softmax_scale=scale, out=None if output is None else output[:, None],
            lse=None if lse is None else lse[:, :, None],
        )  # fmt: skip
    except GuardError as error:
        raise rename(error, _ATTENTION_NAMES) from None
    return out[:, 0], found[:, :, 0]
