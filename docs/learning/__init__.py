"""Scripts that draw the learning curves of the documents."""
