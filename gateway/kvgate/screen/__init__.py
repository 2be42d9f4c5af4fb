"""``kvgate screen``: may the result of a transform be shared, and by which key? docs/screening.md states the questions and the rules.

Importing this package needs nothing heavy. A screening needs torch and ``kvgate_kernels``; measuring drift needs transformers too.
"""
