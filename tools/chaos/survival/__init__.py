"""Which sets of nodes a job may lose at once: predicted by simulation, measured with processes."""
