"""A plan for people: table, graph, explanation, difference. Reached through the methods of `Plan`; reads plans only."""
