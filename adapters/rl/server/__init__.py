"""Rank 0: gives out work, takes samples, salvages."""
