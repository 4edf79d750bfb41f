"""The decorator, `Run`, and what happens between generations."""
