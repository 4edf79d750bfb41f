"""History of a job, and the checker."""
