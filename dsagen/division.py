"""Division by a run-time number, as kernels do it: one multiplication and a shift."""

from __future__ import annotations

# floor(n / page_size) is exact for token ids and indices, which are int32.
_DIVIDEND_BITS = 31


def page_divisor(page_size: int) -> tuple[int, int]:
    """(multiplier, shift) with n // page_size == n * multiplier >> (31 + shift) for every 0 <= n < 2^31.

    `shift` is ceil(log2(page_size)); the product stays below 2^64 for page sizes of 1 .. 2^30.
    """
    shift = (page_size - 1).bit_length()
    return -(-(1 << (_DIVIDEND_BITS + shift)) // page_size), shift
