"""Exact top-k of each row of scores, with the transform of its indices to what attention reads fused in."""

from dsagen.families.topk.family import FAMILY

__all__ = ["FAMILY"]
