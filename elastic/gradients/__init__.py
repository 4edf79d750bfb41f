"""The mean gradient of a step over all ranks; on request exact, whatever their number."""
