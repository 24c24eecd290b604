"""Asynchronous disk reads that leave nothing in the page cache."""
