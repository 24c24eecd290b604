"""Proof of Programs, and checks of graphs."""
