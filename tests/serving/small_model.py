"""A decoder of DeepSeek-V3.2's form, a few layers small with random weights, that generates over paged caches.

`Weights` and `next_logits` are the model. It attends in two ways: `PagedAttention` stores rows and index keys in pages
and runs `decode_step`, with everything that a step reads in buffers of fixed addresses, so that a graph of it may be
captured; `PlainAttention` is the same in torch, over rows that lie as they come, by no kernel and no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN, VOCABULARY, LAYERS, HEADS, INDEX_HEADS, INDEX_DIM, K = 128, 64, 3, 16, 8, 128, 16
ROW, VALUE, PAGE = 576, 512, 16
# Layers that attend to what the layer before has selected.
SHARING = frozenset({1})
SPEC = {
    "model": "v32", "heads": HEADS, "archs": ["sm_90a"], "topk": K, "index": {"heads": INDEX_HEADS, "dim": INDEX_DIM},
    "ops": ["indexer_logits", "topk", "sparse_decode", "kv_cache"],
}  # fmt: skip

# Of a layer: its number, rows bf16 [batch, 576], q bf16 [batch, heads, 576], and index q [batch, heads, dim], keys
# [batch, dim] and weights [batch, heads] where it has an indexer; returns [batch, heads, 512] in fp32.
Indexer = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[int, Tensor, Tensor, Indexer | None], Tensor]


class Weights:
    """Random weights, the same on every device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(seed)

        def matrices(columns: int, rows: int = HIDDEN, gain: float = 1.0) -> Tensor:
            return (torch.randn(LAYERS, rows, columns, generator=draw) * gain / rows**0.5).to(device)

        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=draw).to(device)
        self.head = torch.randn(HIDDEN, VOCABULARY, generator=draw).to(device)
        self.row, self.q = matrices(ROW), matrices(HEADS * ROW)
        self.index_q, self.index_key = matrices(INDEX_HEADS * INDEX_DIM), matrices(INDEX_DIM)
        self.index_weight = matrices(INDEX_HEADS)
        self.out = matrices(HIDDEN, HEADS * VALUE, 0.3)
        self.up, self.down = matrices(HIDDEN), matrices(HIDDEN)


def next_logits(weights: Weights, tokens: Tensor, attend: Attend) -> Tensor:
    """fp32 [batch, vocabulary] of one token of each request, int64 [batch]."""
    x = weights.embedding[tokens]
    batch = len(tokens)
    for layer in range(LAYERS):
        h = _normed(x)
        indexer = None
        if layer not in SHARING:
            q = (h @ weights.index_q[layer]).view(batch, INDEX_HEADS, INDEX_DIM)
            indexer = q, h @ weights.index_key[layer], h @ weights.index_weight[layer]
        query = (h @ weights.q[layer]).view(batch, HEADS, ROW)
        out = attend(layer, (h @ weights.row[layer]).bfloat16(), query.bfloat16(), indexer)
        x = x + out.flatten(1) @ weights.out[layer]
        x = x + torch.tanh(_normed(x) @ weights.up[layer]) @ weights.down[layer]
    return _normed(x) @ weights.head


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 codes, fp32 scales) by the largest of the last dim."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    return (x / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class PagedAttention:
    """Attention by the kernels, for up to `batch` requests of up to `pages` pages each."""

    def __init__(self, kernels: Any, batch: int, pages: int) -> None:
        self.kernels, at = kernels, {"device": kernels.device}
        count = batch * pages + 1  # the last page takes what rows without a request would store
        self.spare = (count - 1) * PAGE
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(4))
        self.table = order.view(batch, pages).int().to(kernels.device)
        self.pools = [torch.zeros(count, PAGE, 1, 656, dtype=torch.uint8, **at) for _ in range(LAYERS)]
        self.keys = [torch.zeros(count, PAGE, 1, INDEX_DIM + 4, dtype=torch.uint8, **at) for _ in range(LAYERS)]
        self.slots = torch.full((batch,), -1, dtype=torch.int64, **at)
        self.lengths = torch.zeros(batch, dtype=torch.int32, **at)
        self.plan = kernels.plan_decode_step(batch, 1, pages * PAGE)

    def place(self, position: Tensor, live: Tensor) -> None:
        """Say where a token of each request goes: int64 [batch] positions, bool [batch] of requests that have one."""
        page = self.table.gather(1, (position // PAGE)[:, None])[:, 0]
        self.slots.copy_(torch.where(live, page * PAGE + position % PAGE, -1))
        self.lengths.copy_(torch.where(live, position + 1, 0))

    def __call__(self, layer: int, rows: Tensor, q: Tensor, indexer: Indexer | None) -> Tensor:
        """One layer's, as `Attend`."""
        pool = self.pools[layer]
        self.kernels.kv_write(rows, pool, self.slots)
        selecting: dict[str, Any] = {"reuse_ids": True}
        if indexer is not None:
            index_q, key, weight = indexer
            self._store(layer, key)
            codes, scale = quantised(index_q)
            selecting = {
                "index_q": codes[:, None],
                "index_cache": self.keys[layer],
                "weights": weight * scale,
                "context_lens": self.lengths,
                "block_table": self.table,
            }
        out, _ = self.kernels.decode_step(q[:, None], pool, plan=self.plan, **selecting)
        return out[:, 0].float()

    def _store(self, layer: int, key: Tensor) -> None:
        """Codes of a page lie before its scales."""
        codes, scale = quantised(key)
        slot = torch.where(self.slots < 0, self.spare, self.slots)
        page, offset = slot // PAGE * PAGE * (INDEX_DIM + 4), slot % PAGE
        flat = self.keys[layer].view(-1)
        dims, parts = torch.arange(INDEX_DIM, device=slot.device), torch.arange(4, device=slot.device)
        flat[(page + offset * INDEX_DIM)[:, None] + dims] = codes.view(torch.uint8)
        flat[(page + PAGE * INDEX_DIM + 4 * offset)[:, None] + parts] = scale[:, None].view(torch.uint8)


class PlainAttention:
    """Attention of one request in torch, over lists of rows and keys."""

    def __init__(self, sm_scale: float) -> None:
        self.sm_scale = sm_scale
        self.rows: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        self.keys: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        self.selected = torch.empty(0, dtype=torch.int64)
        self.narrowest = math.inf

    def __call__(self, layer: int, rows: Tensor, q: Tensor, indexer: Indexer | None) -> Tensor:
        """One layer's, as `Attend`, for a batch of one."""
        codes, scale = quantised(rows[0, :VALUE].float().view(-1, 128))
        latent = (codes.float() * scale[:, None]).flatten()
        self.rows[layer].append(torch.cat((latent, rows[0, VALUE:].float())))
        if indexer is not None:
            self.selected = self.select(layer, *indexer)
        x = torch.stack(self.rows[layer])[self.selected].double()
        probability = (q[0].double() @ x.T * self.sm_scale).softmax(1)
        return (probability @ x[:, :VALUE]).bfloat16().float()[None]

    def select(self, layer: int, index_q: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        """Positions of the K best keys, those of the token itself among them."""
        codes, scale = quantised(key[0])
        self.keys[layer].append(codes.float() * scale)
        codes, scale = quantised(index_q[0])
        products = (codes.float() @ torch.stack(self.keys[layer]).T).relu()
        scores = (weight[0] * scale) @ products
        order = scores.argsort(descending=True, stable=True)
        if len(order) > K:
            apart = (scores[order[K - 1]] - scores[order[K]]) / scores.abs().max()
            self.narrowest = min(self.narrowest, float(apart))
        return order[:K]


@dataclass(frozen=True)
class Generation:
    """Tokens of each request behind its prompt, and logits of each token.

    `narrowest` is the least distance of a score that was selected to the next one, as a part of the largest of its row.
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    narrowest: float = math.inf

    @property
    def closest(self) -> float:
        """The least distance of a token that was taken to the next best."""
        best = [logits.topk(2, -1).values for logits in self.logits]
        return min(float((pair[:, 0] - pair[:, 1]).min()) for pair in best)


def generate_plain(weights: Weights, prompts: Sequence[Sequence[int]], new: int, sm_scale: float) -> Generation:
    """Each request by itself, in torch."""
    device, tokens, logits, narrowest = weights.embedding.device, [], [], math.inf
    for prompt in prompts:
        attend, text, own = PlainAttention(sm_scale), list(prompt), []
        for position in range(len(prompt) + new - 1):
            found = next_logits(weights, torch.tensor(text[position : position + 1], device=device), attend)[0]
            if position >= len(prompt) - 1:
                text.append(int(found.argmax()))
                own.append(found)
        tokens.append(text[len(prompt) :])
        logits.append(torch.stack(own))
        narrowest = min(narrowest, attend.narrowest)
    return Generation(tokens, logits, narrowest)


class PagedGeneration:
    """All requests together by the kernels: a step reads and writes buffers only, so that it can be captured.

    Prompts are read token by token. A request that has all of its new tokens leaves the batch.
    """

    def __init__(self, kernels: Any, weights: Weights, prompts: Sequence[Sequence[int]], new: int) -> None:
        device, longest = kernels.device, max(map(len, prompts)) + new
        self.weights, self.prompts, self.new = weights, prompts, new
        self.attention = PagedAttention(kernels, len(prompts), -(-longest // PAGE))
        self.text = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.text[row, : len(prompt)] = torch.tensor(prompt)
        self.given = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.position = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self.logits = torch.zeros(len(prompts), VOCABULARY, device=device)

    def step(self) -> None:
        """One token of each request."""
        live = self.position < self.given + self.new - 1
        at = self.position.clamp(max=self.text.shape[1] - 2)
        self.attention.place(at, live)
        tokens = self.text.gather(1, at[:, None])[:, 0]
        self.logits.copy_(next_logits(self.weights, tokens, self.attention))
        following = self.text.gather(1, at[:, None] + 1)[:, 0]
        taken = torch.where(live & (at + 1 >= self.given), self.logits.argmax(1), following)
        self.text.scatter_(1, at[:, None] + 1, taken[:, None])
        self.position += live

    def run(self, step: Callable[[], None]) -> Generation:
        """Generate by `step`, which is `self.step` or a graph of it."""
        logits: list[list[Tensor]] = [[] for _ in self.prompts]
        for number in range(max(map(len, self.prompts)) + self.new - 1):
            step()
            for row, prompt in enumerate(self.prompts):
                if len(prompt) - 1 <= number < len(prompt) - 1 + self.new:
                    logits[row].append(self.logits[row].clone())
        tokens = [self.text[row, len(p) : len(p) + self.new].tolist() for row, p in enumerate(self.prompts)]
        return Generation(tokens, [torch.stack(own) for own in logits])

    def reset(self) -> None:
        """As if nothing had been generated; what lies in caches is written anew before it is read."""
        self.position.zero_()
        for row, prompt in enumerate(self.prompts):
            self.text[row, len(prompt) :] = 0
