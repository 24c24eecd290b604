"""Passes that apply a plan to graphs: copies, kernels, addresses."""
