"""Discovery of the cluster that a process runs on."""
