"""Who guards whom and how: groups, stripes, erasure code, memory budget."""
