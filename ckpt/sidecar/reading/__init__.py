"""The operations of readers, and the rebuilding of lost blocks for them."""
