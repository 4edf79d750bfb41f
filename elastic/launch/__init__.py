"""`holdfast run`: the launcher of one machine, and several launchers of one job."""
