"""What a run's events say of it: recoveries by phase, goodput, curves, and a page that shows it."""
