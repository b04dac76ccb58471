"""Decides what the next step computes. Torch-free."""
