"""`holdfast logs`: the history of a run, its events and its processes' output, in time order."""
