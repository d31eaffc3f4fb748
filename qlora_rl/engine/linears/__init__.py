"""How a 4-bit linear and an adapter are multiplied, on CPU and GPU."""
