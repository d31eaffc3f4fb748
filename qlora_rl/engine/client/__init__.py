"""An engine in another process, such as a server. HTTP only: vLLM need not be installed here."""

from qlora_rl.engine.client.engine import ServerEngine
from qlora_rl.engine.client.engine_client import EngineClient
from qlora_rl.engine.client.prompt_logprobs import Candidates, PromptLogprobs

__all__ = ["Candidates", "PromptLogprobs", "EngineClient", "ServerEngine"]
