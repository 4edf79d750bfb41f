"""The sources of a restore other than memory, which the ranks read in step with each other."""
