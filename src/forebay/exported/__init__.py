"""Rewritten graphs written to disk: as a bundle that Forebay starts from, and in formats that other runtimes read."""
