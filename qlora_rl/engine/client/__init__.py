"""A server as an engine. HTTP only: vLLM need not be installed here."""

from qlora_rl.engine.client.base_probe import ServerProbe
from qlora_rl.engine.client.engine import ServerEngine, connect
from qlora_rl.engine.client.prompt_logprobs import Candidates, PromptLogprobs

__all__ = ["Candidates", "PromptLogprobs", "ServerEngine", "ServerProbe", "connect"]
