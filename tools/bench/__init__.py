"""`holdfast bench`: each section times one thing beside a physical reference and a peer."""
