"""How sequences become logprobs: the trainer's forward pass and its output head."""
