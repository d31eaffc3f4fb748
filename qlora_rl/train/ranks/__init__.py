"""Several processes: an engine for all of them, sharded models, DeepSpeed's ZeRO."""
