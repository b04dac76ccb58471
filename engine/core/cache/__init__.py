"""KV bookkeeping: which page belongs to whom. Torch-free, and unaware of what a page contains."""
