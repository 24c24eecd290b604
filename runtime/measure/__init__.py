"""Measuring a machine."""
