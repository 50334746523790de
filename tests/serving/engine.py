"""A small paged decode loop, as an engine writes it: what the serving tests and the README speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsagen.kv_format import kv_format

HEADS, TOPK, PAGE = 16, 2048, 64


@dataclass
class Layer:
    """One layer's cache and the random numbers that stand for its weights."""

    cache: Tensor
    mix: Tensor


class Engine:
    """Layers over one set of kernels: each stores its new row, selects, attends, and feeds the next.

    All that a step reads lies in buffers of fixed addresses, so that a graph can be captured at `batch` and replayed
    with fewer live requests: the rows of the others have slot -1 and length 0, and do nothing.
    """

    def __init__(self, kernels: Any, layers: int, batch: int, max_pages: int, topk: int = TOPK) -> None:
        device, spec = kernels.device, kernels.spec
        generator = torch.Generator(device=device).manual_seed(7)
        self.kernels, self.batch, self.topk, self.max_pages = kernels, batch, topk, max_pages
        columns = kv_format(spec.kv.format_id).cache_tensor().columns
        pool = (batch * max_pages, PAGE, 1, columns)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        self.layers = [
            Layer(torch.zeros(pool, dtype=torch.uint8, device=device), normal(512, 576) / 20) for _ in range(layers)
        ]
        self.hidden = torch.zeros(batch, spec.heads, 576, device=device)
        self.key = normal(576)
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        order = torch.randperm(batch * max_pages, device=device, generator=generator)
        self.page_table = order.int().view(batch, max_pages)
        self.scores = normal(batch, max_pages * PAGE)
        self.result = torch.zeros(batch, spec.heads, 576, device=device)
        self.decode_plan = kernels.plan_sparse_decode(batch, 1, topk)
        self.topk_plan = kernels.plan_topk(batch, max_pages * PAGE, topk)
        # Outputs are the engine's, as its buffers are.
        self.counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.ids = torch.zeros(batch, topk, dtype=torch.int32, device=device)
        self.out = torch.zeros(batch, 1, spec.heads, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.zeros(batch, 1, spec.heads, device=device).transpose(1, 2)

    def place(self, live: int, step: int) -> None:
        """Make room for one token of each live request; the others have none."""
        position = torch.full((live,), step, dtype=torch.int64, device=self.slots.device)
        pages = self.page_table[:live].gather(1, (position // PAGE)[:, None])[:, 0]
        self.slots.fill_(-1)
        self.slots[:live] = pages * PAGE + (position % PAGE).int()
        self.lengths.zero_()
        self.lengths[:live] = step + 1

    def step(self) -> None:
        """One token through all layers; reads and writes buffers only, so that it can be captured."""
        hidden, kernels = self.hidden, self.kernels
        # Each layer stores the same: were it to depend on the layer before, codes that lie between two would flip.
        row = (hidden.mean(1) + self.key).bfloat16()
        for layer in self.layers:
            kernels.kv_write(row, layer.cache, self.slots)
            kernels.topk(
                self.scores, k=self.topk, lengths=self.lengths, page_table=self.page_table, page_size=PAGE,
                determinism="order", plan=self.topk_plan, out=self.ids, counts=self.counts,
            )  # fmt: skip
            query = hidden.bfloat16()[:, None]
            kernels.sparse_decode(
                query, layer.cache, self.ids[:, None], topk_length=self.counts, plan=self.decode_plan,
                out=self.out, lse=self.lse,
            )  # fmt: skip
            hidden = torch.tanh(self.out[:, 0].float() @ layer.mix)
        self.result.copy_(hidden)


def run(engine: Engine, steps: int, live: Any, call: Any) -> list[Tensor]:
    """The results of a number of steps by `call`, with `live(step)` requests each, from fresh caches."""
    results = []
    for layer in engine.layers:
        layer.cache.zero_()
    for step in range(steps):
        generator = torch.Generator(device="cpu").manual_seed(step)
        engine.hidden.copy_(torch.randn(engine.hidden.shape, generator=generator))
        engine.place(live(step), step)
        call()
        results.append(engine.result.clone())
    return results
