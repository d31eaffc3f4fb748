"""The files that `qlora-rl demo --model smollm2` writes for the user: a run and its reward."""
