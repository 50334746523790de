"""Rows, slots, block tables and poisoned pools for checks of the ops that fill and read caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsagen.check.kv_cases import Contents
from dsagen.check.probes import WrongResultError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GAP = 24  # elements behind each row
# Requests of a block table, and columns that it has at the least.
_REQUESTS, _SPARE_COLUMNS = 7, 2


@dataclass(frozen=True)
class PoolShape:
    """Pages of a pool and tokens of a page."""

    pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """Tokens that slots can name."""
        return self.pages * self.page_size


def make_rows(count: int, dims: int, contents: Contents, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[count, dims + GAP], the gap NaN."""
    device = generator.device
    shape = (count, dims)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size or shape, device=device, generator=generator)

    x = torch.randn(shape, device=device, generator=generator)
    match contents:
        case Contents.MAGNITUDES:
            exponents = integers(-30, 12, count, dims // 16).float()
            x = x * exponents.exp2().repeat_interleave(16, 1)
            x[::7] *= 2.0**-120
        case Contents.ZEROS:
            x = torch.where(integers(0, 2) == 0, 0.0, -0.0)
            x[::3] += integers(-1, 2, len(x[::3]), dims) * 1e-6
        case Contents.TIES:
            x = integers(-26, 27) / 4.0
        case Contents.LARGE:
            x = x * (torch.finfo(dtype).max / 8)
        case Contents.SPECIAL:
            specials = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
            x = torch.where(integers(0, 300) == 0, specials[integers(0, 3)], x)
        case Contents.NORMAL:
            pass
    rows = torch.full((count, dims + GAP), torch.nan, dtype=dtype, device=device)
    rows[:, :dims] = x.to(dtype)
    return rows


def make_slots(rows: int, tokens: int, generator: torch.Generator, *, distinct: bool, wide: bool) -> Tensor:
    """[rows] slots: some negative, some at or past the pool; the others distinct where they are written."""
    device = generator.device
    if distinct:
        drawn = torch.randperm(max(tokens, rows), device=device, generator=generator)[:rows]
    else:
        drawn = torch.randint(0, tokens, (rows,), device=device, generator=generator)
    if rows > 4:
        drawn[torch.randint(0, rows, (rows // 5,), device=device, generator=generator)] = -1
        drawn[0], drawn[1] = tokens, 2**40 if wide else 2**31 - 1
        drawn[2] = -(2**50) if wide else -(2**31)
    return drawn if wide else drawn.to(torch.int32)


def make_table(rows: int, pool: PoolShape, generator: torch.Generator) -> dict[str, Tensor]:
    """A block table of requests of uneven length, some empty; pages given back, and positions past a table's end."""
    device = generator.device
    cuts = torch.randint(0, rows + 1, (_REQUESTS - 1,), device=device, generator=generator).sort().values
    ends = torch.tensor([min(1, rows - 1), rows], device=device)
    starts = torch.cat((ends[:1], cuts.clamp(min=int(ends[0])), ends[1:])).to(torch.int32)
    first = torch.randint(-1, 3 * pool.page_size, (_REQUESTS,), device=device, generator=generator, dtype=torch.int32)
    # Half of what the longest possible request needs, whatever is drawn: a captured call has one shape.
    shape = (_REQUESTS, rows // pool.page_size // 2 + _SPARE_COLUMNS)
    table = torch.randint(-1, pool.pages + 1, shape, device=device, generator=generator, dtype=torch.int32)
    return {"block_table": table, "row_starts": starts, "token_starts": first}


def whole(tensor: Tensor) -> Tensor:
    """A tensor's elements, of a pool all bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def randomise(pool: Tensor, generator: torch.Generator) -> None:
    """Random bytes, padding included."""
    whole(pool).random_(generator=generator)


def copy_of(pool: Tensor) -> Tensor:
    """The same pool over a storage of its own, padding included."""
    return whole(pool).clone().view(pool.dtype).as_strided(pool.shape, pool.stride(), pool.storage_offset())


def require_equal_bytes(name: str, found: Tensor, wanted: Tensor) -> None:
    """WrongResultError for the first byte of a pool's storage that differs."""
    different = whole(found) != whole(wanted)
    count = int(different.sum())
    if count:
        at = int(different.nonzero()[0])
        page, byte = divmod(at, found.stride(0) * found.element_size())
        raise WrongResultError(
            f"{name}: byte {byte} of page {page} is {int(whole(found)[at]):#04x}, expected "
            f"{int(whole(wanted)[at]):#04x}; {count} bytes differ"
        )
