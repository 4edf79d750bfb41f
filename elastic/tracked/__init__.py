"""One generation's hold on the tracked state: restore, snapshot, save."""
