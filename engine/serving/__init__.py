"""The serving side: HTTP front, tokenizing, detokenizing, and the transport to the core.

Knows no telemetry library: it states facts to an `Observer` that is handed in.
"""
