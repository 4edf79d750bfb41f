"""The small jobs that the ready scenarios hurt."""
