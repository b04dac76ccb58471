"""Turns logits into tokens, with counter-based noise. Imports torch."""
