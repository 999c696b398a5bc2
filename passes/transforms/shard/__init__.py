"""The rewrite of a whole graph into what one rank runs."""
