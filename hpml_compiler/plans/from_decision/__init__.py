"""Build the record of a solved graph: layouts and indices become names, placement strings and bytes."""
