"""Graphs of one rank of several, that each compute a part of a model and exchange what they lack."""
