"""The commands of `qlora-rl`, one module each: `add` takes arguments, `run` brings in what it runs, and only then."""
