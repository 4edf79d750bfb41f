"""The mean gradient of a step over all ranks; on request exact, for any number of ranks."""
