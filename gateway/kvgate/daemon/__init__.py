"""The gateway daemon: sessions, registry, leases, presence, policy, transfers, admin. No payload byte crosses its one asyncio loop."""
