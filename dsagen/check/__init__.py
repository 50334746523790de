"""Conformance: cases as data, inputs that try to break a kernel, comparison with the fp64 reference, reports."""
