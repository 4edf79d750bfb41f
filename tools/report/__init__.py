"""The report of a run, built from its events: recoveries by phase, goodput, curves, and a page."""
