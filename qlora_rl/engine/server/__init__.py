"""vLLM's OpenAI server on a base, with routes of its own for the trainer that pushes to it."""

from qlora_rl.engine.server.launch import LocalServer, serve, start_server

__all__ = ["LocalServer", "serve", "start_server"]
