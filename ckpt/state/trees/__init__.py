"""Trees: what an object with ``state_dict``, or one rank alone, adds to a state."""
