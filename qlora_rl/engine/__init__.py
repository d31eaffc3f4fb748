"""Whatever generates: vLLM in this process, and a small engine in plain torch for tests. vLLM is known here only."""
