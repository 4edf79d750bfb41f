"""The plan of the next generation: mesh, ranks, shares, restore point, and the reason."""
