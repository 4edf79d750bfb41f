"""The plan of a job before it runs: memory, overhead, the chance of a loss, goodput, intervals."""
