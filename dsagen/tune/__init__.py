"""Measuring which kernel of sparse decode is fastest with how many splits, and the tables that this makes."""
