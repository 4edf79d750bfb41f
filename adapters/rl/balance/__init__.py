"""The balance between the roles of an RL job: who waits for whom, and which worker should move."""
