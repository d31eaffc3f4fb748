"""vLLM's OpenAI server on a base, with routes of its own for the trainer that pushes to it."""

from qlora_rl.engine.server.auth import Gate
from qlora_rl.engine.server.launch import LocalServer, bind, check_host, read_or_make_key, serve, start_server

__all__ = ["Gate", "LocalServer", "bind", "check_host", "read_or_make_key", "serve", "start_server"]
