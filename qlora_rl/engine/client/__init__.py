"""A server as an engine. HTTP only: vLLM need not be installed here."""

from qlora_rl.engine.client.base_probe import ServerProbe
from qlora_rl.engine.client.engine import ServerEngine, connect

__all__ = ["ServerEngine", "ServerProbe", "connect"]
