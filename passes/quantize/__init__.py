"""Passes that put packed rows into captured graphs."""
