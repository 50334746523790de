"""Filling and reading KV caches: rows into slots, slots into bf16 rows, tokens between two layouts of a format."""

from dsagen.families.kv_cache.family import FAMILY

__all__ = ["FAMILY"]
