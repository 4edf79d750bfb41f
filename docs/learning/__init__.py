"""Scripts that draw the curves of the documents."""
