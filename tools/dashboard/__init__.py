"""`holdfast dashboard`: a run in the browser as it goes, served by a reader that may die."""
