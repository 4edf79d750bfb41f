"""What hurts a job of real processes, a family of faults per module (`tools.chaos.injector`)."""
