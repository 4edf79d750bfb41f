"""Readers beside a job: processes that the launcher starts, which read the run and may die."""
