"""The decorator `resilient`, `Run`, and the change from one generation to the next."""
