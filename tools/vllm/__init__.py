"""vLLM servers of a tiny model, for the demo and the benchmark."""
