"""Questions asked of runs: what differs, and where."""
