"""The output of commands: status, tables and lines for people, metrics for machines."""
