"""How a batch is shared out among groups of unlike devices."""
