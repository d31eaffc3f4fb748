"""vLLM's OpenAI server on a base, with routes of its own for the trainer that pushes to it."""

from qlora_rl.engine.server.beside import ServerBeside
from qlora_rl.engine.server.start import serve, start_server

__all__ = ["ServerBeside", "serve", "start_server"]
