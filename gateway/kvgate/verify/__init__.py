"""``kvgate verify``: the negative matrix against a live gateway, as a client of it. Imports nothing of the daemon."""
