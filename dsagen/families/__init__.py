"""Kernel families, one folder each; `dsagen.family.families()` finds them."""
