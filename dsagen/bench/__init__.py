"""Measurement on a device: timing, benchmark inputs and the kernel libraries that dsagen compares itself with."""
