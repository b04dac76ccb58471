"""Compares the token ids of two runs, request by request. Knows nothing of why they differ."""
