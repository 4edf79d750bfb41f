"""The operations of workers that write a snapshot: acquire, seal, abandon."""
