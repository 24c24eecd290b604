"""How much of the cache may be kept as checkpoints of the layer input."""

# (checkpoints, period): shares of a staged cache that are planned, of which those on either side of the balance get
# Programs
SHARES = ((1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (1, 1))
