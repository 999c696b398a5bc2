"""Views of a plan: table, graph, explanation, diff. Called by the methods of `Plan`; they depend on plans only."""
