"""The `holdfast` command and everything behind it."""
