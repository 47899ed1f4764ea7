"""Measurements of the fused call: ``python -m deep_gemm_k3 bench``.

A time belongs to a result that was compared with the oracle in the same run, before and after the timed calls.
"""
