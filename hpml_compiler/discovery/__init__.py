"""Finding out what machines a process runs on."""
