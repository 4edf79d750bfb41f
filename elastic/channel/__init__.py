"""How a worker talks to the job: under an agent, under torchrun or Slurm, alone."""
