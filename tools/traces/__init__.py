"""Traces: changes of the ranks, checkpoints and joins of a job as spans for OpenTelemetry."""
