"""Watchdog: each rank posts its status, and a rank that is late, gone or elsewhere is named."""
