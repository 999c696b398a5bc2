"""Device and process group of this rank."""
