"""The output of commands: status, tables and lines for people, and metrics for machines."""
