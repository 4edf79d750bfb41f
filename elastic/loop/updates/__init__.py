"""The update that ends a phase: the optimizers that make it, and a watch over everything else."""
