"""Pages of one HTML file, which need neither a server nor a network."""
