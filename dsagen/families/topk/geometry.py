"""Sizes of the top-k kernels: threads, digits, and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsagen.dtype import BF16, FP32, ElementType
from dsagen.plan import SmemField, lay_out_smem

SCORE_TYPES: Mapping[str, ElementType] = {"fp32": FP32, "bf16": BF16}
SCORE_CPP: Mapping[str, str] = {"fp32": "topk::Fp32Score", "bf16": "topk::Bf16Score"}
DIGIT_BITS = 11
VECTOR_BYTES = 16
WORD_BYTES = 4
WARP_THREADS = 32
MOST_THREADS = 1024
SMALL_THREADS = 256
# Of blocks that sweep a row: one to an SM, and two that wait in turn.
STREAM_THREADS = (MOST_THREADS, 512)
# Elements are (key, index), 8 B. A row with more of them under a digit than have room is swept for the next digit too.
LIST_ELEMENTS = 8192
# So few elements are compared all with all: a warp has four of them at most.
RIVALS = 128
# Vectors of 16 B that each thread adds to the sample of a long row.
SAMPLED = 4
# Scores of listed elements that a thread waits for together, where they come from global memory.
AT_ONCE = 4
# Indices are put in order so many words of bits at a time.
STREAM_BITMAP_WORDS = 4096
# Vectors of 16 B that a thread has on their way at a time; fewer where nvcc 13.0 has no registers for as many.
IN_FLIGHT, FEWER_IN_FLIGHT = 4, 2
FEW_REGISTERS = ("sm_80", "sm_86", "sm_89")


@dataclass(frozen=True)
class Geometry:
    """What every block is: threads that find an 11-bit digit at a time."""

    score: str
    threads: int
    digit_bits: int = DIGIT_BITS

    @property
    def key_bits(self) -> int:
        """Bits of a key, which are those of a score."""
        return SCORE_TYPES[self.score].bits

    @property
    def levels(self) -> int:
        """Digits of a key."""
        return -(-self.key_bits // self.digit_bits)

    @property
    def vector_scores(self) -> int:
        """Scores in 16 bytes."""
        return VECTOR_BYTES * 8 // self.key_bits

    @property
    def word_scores(self) -> int:
        """Scores in 4 bytes."""
        return WORD_BYTES * 8 // self.key_bits

    in_flight: int = IN_FLIGHT
    # Room in the list of elements, and words of the bitmap.
    elements: int = LIST_ELEMENTS
    bitmap_words: int = STREAM_BITMAP_WORDS
    rivals: int = RIVALS
    sampled: int = SAMPLED
    at_once: int = AT_ONCE

    @property
    def search_threads(self) -> int:
        """Threads that find a digit: as many warps as divide the bins among them, a thread for each bin of a row."""
        return WARP_THREADS << max(0, (self.threads // WARP_THREADS).bit_length() - 1)

    @property
    def guess_shift(self) -> int:
        """Bits of a key below the first digit above a guess, whose digits reach a number of four times its size."""
        return max(0, SCORE_TYPES[self.score].mantissa_bits + 1 - self.digit_bits)


@dataclass(frozen=True)
class ResidentGeometry(Geometry):
    """A block whose shared memory holds a row: `words` of 4 bytes a thread."""

    words: int = 32
    # What a block holds is so little that a vector of each thread is a good sample.
    sampled: int = 1
    at_once: int = 1

    @property
    def batches(self) -> int:
        """Parts in which the row arrives."""
        return self.words // (4 * self.in_flight)

    @property
    def vectors(self) -> int:
        """Vectors of 16 B of a thread."""
        return self.words * WORD_BYTES // VECTOR_BYTES

    @property
    def row_scores(self) -> int:
        """Scores that the block holds, counted from a 16-byte boundary."""
        return self.threads * self.words * self.word_scores


# (threads, words a thread, vectors in flight, elements) of the blocks that hold a row, smallest first, by shared-memory
# class: as long a row as leaves room for a list of three times the usual k.
RESIDENT_SHAPES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    227: ((SMALL_THREADS, 32, 4, 4096), (MOST_THREADS, 32, 4, 8192)),
    163: ((SMALL_THREADS, 32, 4, 4096), (MOST_THREADS, 24, 3, 6144)),
    99: ((MOST_THREADS, 8, 2, 6144),),
}


def resident_geometry(score: str, smem_class: int, threads: int) -> ResidentGeometry:
    """The geometry of a block that holds a row; bf16 has twice as many scores in a word, and half as many in flight."""
    words, in_flight, elements = next(rest for first, *rest in RESIDENT_SHAPES[smem_class] if first == threads)
    g = ResidentGeometry(score, threads, words=words, in_flight=in_flight, elements=elements)
    return replace(g, bitmap_words=-(-g.row_scores // 32 // threads) * threads)


# (words a thread, vectors in flight, elements, words of the bitmap) of the blocks that hold a part of a row, by
# shared-memory class: as long a part as those of row_resident, and indices of rows of several parts in one window.
CLUSTER_SHAPES: Mapping[int, tuple[int, int, int, int]] = {227: (64, 4, 8192, 4096), 99: (16, 2, 6144, 2048)}
# Blocks of a cluster, most first.
CLUSTER_SIZES = (8, 4, 2)
# What every warp does by itself takes as long as there are warps, so a block that has little of a row has few.
CLUSTER_THREADS = 512
# Candidates that a thread of the first block has in registers: twice the usual k in all.
CLUSTER_AT_ONCE = 8


def cluster_geometry(score: str, smem_class: int) -> ResidentGeometry:
    """The geometry of a block that holds a part of a row, beside others of its cluster."""
    words, in_flight, elements, bitmap_words = CLUSTER_SHAPES[smem_class]
    g = ResidentGeometry(score, CLUSTER_THREADS, words=words, in_flight=in_flight, elements=elements)
    return replace(g, bitmap_words=bitmap_words, at_once=CLUSTER_AT_ONCE, sampled=2)


def sweeping_geometry(score: str, arch: str, threads: int = MOST_THREADS) -> Geometry:
    """The geometry of a block that sweeps a row in global memory."""
    return Geometry(score, threads, in_flight=FEWER_IN_FLIGHT if arch in FEW_REGISTERS else IN_FLIGHT)


def resident_smem(g: ResidentGeometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct of row_resident and its size in bytes."""
    fields = (
        SmemField("words", "u32", (g.threads * g.words,), "the row's scores"),
        SmemField("landed", "u64", (max(g.batches, 2),), "barriers: a batch of the row has arrived"),
    )
    return lay_out_smem([*fields, *_select_fields(g)])


def cluster_smem(g: ResidentGeometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct of row_cluster and its size in bytes."""
    most = max(CLUSTER_SIZES)
    fields = (
        SmemField("words", "u32", (g.threads * g.words,), "scores of the block's part"),
        SmemField("landed", "u64", (max(g.batches, 2),), "barriers: a batch of the part has arrived"),
        SmemField("released", "u64", (1,), "barrier: nobody reads what the block has"),
        SmemField("group_sums", "u32", (most, 32), "keys in each group of bins, of each block of the cluster"),
        SmemField("told", "u32", (2, most), "numbers that each block tells the others"),
    )
    return lay_out_smem([*fields, *_select_fields(g)])


def stream_smem(g: Geometry) -> tuple[tuple[SmemField, ...], int]:
    """The shared-memory struct of row_stream and its size in bytes."""
    return lay_out_smem(_select_fields(g))


def _select_fields(g: Geometry) -> tuple[SmemField, ...]:
    return (
        SmemField("histogram", "u32", ((1 << g.digit_bits) + 1,), "keys by their next digit"),
        SmemField("warp_sums", "u32", (2, 32), "of a prefix sum over the block, two sets"),
        SmemField(
            "found", "u32", (4,), "digit of the k-th key, how many of it to take, how many there are; the last rival"
        ),
        SmemField(
            "listed", "u32", (4,), "elements in the list so far, what one thread tells the others (2), rivals so far"
        ),
        SmemField("keys", "u32", (max(g.elements, 4),), "their keys"),
        SmemField("indices", "u32", (max(g.elements, 4),), "and indices"),
        SmemField("rivals", "u32", (2 * g.rivals,), "keys and indices of the last few in question"),
        SmemField("bitmap", "u32", (g.bitmap_words,), "selected indices, a bit each"),
    )
