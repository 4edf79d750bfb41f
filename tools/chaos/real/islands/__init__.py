"""A job of several islands or policies as the victim, and the story of their runs."""
