"""What the next generation looks like: meshes, places, shares, who is held off, and why."""
