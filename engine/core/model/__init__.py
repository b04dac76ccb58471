"""Runs a transformers causal LM over paged KV. Imports torch."""
