"""Recovery in process: ranks that survive the loss of another go on without a restart."""
