"""kvgate: a cache gateway for LLM serving. A hit happens only when it is right."""

__version__ = "0.1.0"
