"""Recording of a run: `hpml_compiler.Monitor` and its sinks. See docs/guides/monitoring.md."""
