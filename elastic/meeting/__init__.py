"""The store in which the ranks of a generation meet, for holders of the run's key only."""
