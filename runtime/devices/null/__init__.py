"""A device that computes nothing: plans for it are made, lowered, proved and walked."""
