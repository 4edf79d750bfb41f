"""Metrics for Prometheus: their table, the counts from the events, and the server of `/metrics`."""
