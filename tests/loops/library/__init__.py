"""Training loops in the shape in which they are found in public, each beside its port."""
