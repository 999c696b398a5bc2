"""Watchdog: ranks post heartbeats, and errors name the rank that is late, gone or elsewhere."""
