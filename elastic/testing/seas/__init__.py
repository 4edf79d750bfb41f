"""A simulation of seas: the production code of islands on virtual time, with a store that fails."""
