"""The subcommands of `holdfast chaos`, one per module: ``add_parser(inner)`` and ``run(args)``."""
