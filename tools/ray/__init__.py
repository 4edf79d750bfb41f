"""The command `holdfast ray`: jobs on a Ray cluster."""
