"""`holdfast bench`: sections that each time one operation beside a reference and a peer."""
