"""Pure decisions of an agent: agree, seat, detect, probe, leave."""
