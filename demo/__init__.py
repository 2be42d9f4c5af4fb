"""Demonstrations on real vLLM, real LMCache and a small real model. Run by `make demo` and `make demo-server`."""
