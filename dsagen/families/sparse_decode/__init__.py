"""Sparse MLA decode: attention of each query token over the cache rows that its index list names, with split-KV."""

from dsagen.families.sparse_decode.family import FAMILY

__all__ = ["FAMILY"]
