"""The processes of a node: started, watched and ended."""
