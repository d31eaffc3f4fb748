"""One TOML file is one run: what may stand in it, its checks, and the run itself."""
