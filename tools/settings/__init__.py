"""The settings of commands: `holdfast.toml` and variables, the origin of values, first files."""
