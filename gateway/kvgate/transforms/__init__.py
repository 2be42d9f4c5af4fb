"""Transforms of KV that keep some tokens and drop the rest, all behind one small interface (``base.Transform``).

Importing this package needs nothing heavy; running a transform needs torch and ``kvgate_kernels``.
"""
