"""Measurements of the gateway beside its peers: ``python -m bench`` (``docs/benchmarks.md`` says what each case means)."""
