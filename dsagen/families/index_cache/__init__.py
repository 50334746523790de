"""Filling and reading the cache of index keys: rows into slots, and requests' keys side by side."""

from dsagen.families.index_cache.family import FAMILY

__all__ = ["FAMILY"]
