"""A job of several islands as the victim, and the story of their sea."""
