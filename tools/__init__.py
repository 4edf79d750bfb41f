"""The command line, the dashboards, the benchmarks and the fault injection."""
