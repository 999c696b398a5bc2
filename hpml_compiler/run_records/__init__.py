"""Files of a monitored run: one file of JSON lines per rank, and what they say. See docs/guides/monitoring.md."""
