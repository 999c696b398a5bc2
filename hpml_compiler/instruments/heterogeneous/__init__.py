"""Plans for groups of unlike devices, which share the rows of a batch unevenly."""
