"""`holdfast demo`: a job that is killed again and again, and judged."""
