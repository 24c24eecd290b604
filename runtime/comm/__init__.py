"""Other ranks: the groups that exchange, what a collective calls, and who still lives."""
