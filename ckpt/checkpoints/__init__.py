"""Steps below a root: write, commit, list, open, verify, prune."""
