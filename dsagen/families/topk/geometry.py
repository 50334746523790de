"""Sizes of the top-k kernel: threads, digits, and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsagen.dtype import BF16, FP32, ElementType
from dsagen.plan import SmemField, lay_out_smem

SCORE_TYPES: Mapping[str, ElementType] = {"fp32": FP32, "bf16": BF16}
SCORE_CPP: Mapping[str, str] = {"fp32": "topk::Fp32Score", "bf16": "topk::Bf16Score"}
DIGIT_BITS = 11
THREADS = 1024
# 32 KiB of keys. Rows with more of them under the first digit are swept once more.
CANDIDATES = 8192
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Geometry:
    """What a block is. `candidates` keys fit its buffer; `in_flight` vectors of 16 B a thread loads at a time."""

    score: str
    threads: int = THREADS
    digit_bits: int = DIGIT_BITS
    candidates: int = 0
    in_flight: int = 4

    @property
    def key_bits(self) -> int:
        """Bits of a key, which are those of a score."""
        return SCORE_TYPES[self.score].bits

    @property
    def levels(self) -> int:
        """Digits of a key."""
        return -(-self.key_bits // self.digit_bits)

    @property
    def vector_elements(self) -> int:
        """Scores that a thread loads at once."""
        return VECTOR_BYTES * 8 // self.key_bits


def keeps_candidates(key_bits: int, digit_bits: int = DIGIT_BITS) -> bool:
    """Whether keys are kept in shared memory: with two digits nothing is left to do with them."""
    return key_bits > 2 * digit_bits


def preferred_geometry(score: str, candidates: int) -> Geometry:
    """The geometry of a variant."""
    return Geometry(score, candidates=candidates)


def preferred_candidates(score: str) -> int:
    """Size of the candidate buffer in keys; 0 without one."""
    return CANDIDATES if keeps_candidates(SCORE_TYPES[score].bits) else 0


def smem_fields(g: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct and its size in bytes."""
    fields = [
        SmemField("histogram", "u32", (1 << g.digit_bits,), "keys by their next digit"),
        SmemField("warp_sums", "u32", (2, 32), "of a block's prefix sum, two sets"),
        SmemField("found", "u32", (4,), "digit of the k-th key, how many of it to take, how many there are"),
    ]
    if keeps_candidates(g.key_bits, g.digit_bits):
        fields += [
            SmemField("kept", "u32", (4,), "keys in the buffer so far"),
            SmemField("candidates", "u32", (max(g.candidates, 4),), "keys under the first digit, where all fit"),
        ]
    return lay_out_smem(fields)
