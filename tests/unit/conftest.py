"""What several of the unit tests share."""

from __future__ import annotations

import pytest

from dsagen.dtype import E2M1
from dsagen.families.sparse_decode import rows
from dsagen.kv_format import KvFormat


@pytest.fixture
def no_fp4(monkeypatch: pytest.MonkeyPatch) -> str:
    """Sparse decode without its encoding of FP4; returns what it says of the format."""
    built = rows.encoding_of

    def encoding_of(record: KvFormat) -> rows.Encoding | str:
        is_fp4 = record.segment("values").element is E2M1
        return f"KV format {record.format_id}: FP4 is not built" if is_fp4 else built(record)

    monkeypatch.setattr(rows, "encoding_of", encoding_of)
    return "KV format v41_fp4_interleaved: FP4 is not built"
