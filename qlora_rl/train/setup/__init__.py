"""What a trainer's arguments mean: base and model, settings, memory, and which is loaded first."""
