"""The `holdfast` command and its implementation."""
