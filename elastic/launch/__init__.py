"""`holdfast run`: one machine, or several launchers of one job."""
