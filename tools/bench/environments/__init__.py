"""The benchmark of environments in processes: training beside a thousand of them."""
