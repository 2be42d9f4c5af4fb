"""What shims and the SDK call: one connection to the gateway in a thread of its own, and the mapped pool."""

from __future__ import annotations

from kvgate.client.client import Call, GatewayClient
from kvgate.client.errors import GatewayRefused, GatewayUnavailable
from kvgate.client.pools import PoolMappings

__all__ = ["Call", "GatewayClient", "GatewayRefused", "GatewayUnavailable", "PoolMappings"]
