"""Demonstrations on real vLLM, real LMCache and a small real model. Run by `make demo`, `make demo-server` and `make demo-snapkv`."""
