"""Hypothesis without per-example deadlines: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kvgate-contract", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvgate-contract")
