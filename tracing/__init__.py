"""Turns events into a run directory, spans and metrics; reads runs back."""
