"""A server as an engine. HTTP only: vLLM need not be installed here."""

from qlora_rl.engine.client.engine import ServerEngine
from qlora_rl.engine.client.probe import ServerProbe

__all__ = ["ServerEngine", "ServerProbe"]
