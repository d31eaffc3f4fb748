"""vLLM's OpenAI server on a base, with routes of its own for the trainer that pushes to it."""

from qlora_rl.engine.server.launch import serve, start_server
from qlora_rl.engine.server.local_server import LocalServer

__all__ = ["LocalServer", "serve", "start_server"]
