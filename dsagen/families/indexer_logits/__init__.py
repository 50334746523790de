"""Logits of the lightning indexer: a score for each cached key that a query token sees."""

from dsagen.families.indexer_logits.family import FAMILY

__all__ = ["FAMILY"]
