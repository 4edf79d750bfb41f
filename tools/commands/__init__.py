"""The subcommands of `holdfast`, one module each."""
