"""Draws reports on a terminal. Knows no run directory: it gets plain values."""
