"""Pure decisions of an agent: agree on generations, seat workers, detect hangs, probe, leave."""
