"""Stand-ins for kernels and peers of sparse decode on one small case, which answer with the reference."""

from types import SimpleNamespace

import torch

from dsagen.bench.data import DecodeCase
from dsagen.families.sparse_decode.reference import sparse_decode_reference
from dsagen.kv_format import kv_format

PARTITION = SimpleNamespace(main_ctas=4, one_launch=False)
SMALL = DecodeCase("v32", heads=3, batch=2, s_q=1, topk=16, kv_tokens=64, page_size=16)


class ExactKernels:
    """Answers with the reference, times `error`."""

    device = torch.device("cpu")

    def __init__(self, spec, error=1.0):
        self.spec, self.error, self.plans = spec, error, []

    def prepare(self):
        self.prepared = True

    def plan_sparse_decode(self, batch, s_q, topk, *, extra_topk):
        assert extra_topk == 0
        self.plans.append((batch, s_q, topk))
        return SimpleNamespace(main_slug="the-slug", num_splits=2, partition=PARTITION)

    def sparse_decode(self, q, k_cache, indices, *, plan, softmax_scale, out, lse):
        want = sparse_decode_reference(
            q, kv_format(self.spec.kv.format_id), k_cache, indices, sm_scale=softmax_scale, lse_base=self.spec.lse.base
        )
        out.copy_((want.out * self.error).view_as(out))
        lse.copy_(want.lse.view(out.shape[:3]).transpose(1, 2))
        return out, lse


class StandInPeer:
    version = "1.0"

    def __init__(self, error=1.0, refusal=None, broken=False, name="stand-in"):
        self.error, self.refusal, self.broken, self.name = error, refusal, broken, name

    def label(self, case):
        return f"{self.name}, padded"

    def refuses(self, case):
        return self.refusal

    def bind(self, case, inputs):
        if self.broken:
            raise RuntimeError("no kernel image")

        def call():
            item = inputs[0]
            want = sparse_decode_reference(item.q, case.record, item.k_cache, item.indices, sm_scale=item.sm_scale)
            return (want.out * self.error).view(case.batch, case.s_q, case.heads, -1).bfloat16(), None

        return [call]
