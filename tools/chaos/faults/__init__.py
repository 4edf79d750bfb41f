"""What hurts a job of real processes, one module per family."""
