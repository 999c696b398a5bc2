"""The device and the process group of this rank."""
