"""The history of a job, and the checker that judges it."""
