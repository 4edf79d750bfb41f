"""Record logs: one worker appends to each, and other nodes keep copies."""
