"""One file per verb: parses, wires the parts together, renders."""
