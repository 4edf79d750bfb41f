"""The channel between a worker and its job: under an agent, under torchrun or Slurm, or alone."""
