"""Keeping what K and V are made of in their place."""
