"""Asynchronous disk reads and writes that leave nothing in the page cache."""
