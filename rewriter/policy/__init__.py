"""Policies by closed forms: any shares of weights, cache and activations on any tier, by a linear program."""
