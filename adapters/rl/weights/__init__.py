"""How processes come by weights: warm-up, pull, publish, retain."""
