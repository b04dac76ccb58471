"""The engine: `core` runs a model, `serving` answers clients with it."""
