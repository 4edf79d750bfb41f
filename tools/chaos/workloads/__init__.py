"""The small jobs of the ready scenarios."""
