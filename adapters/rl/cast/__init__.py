"""Policies with trainers of their own: a run for each, and the log of steps in which they meet."""
