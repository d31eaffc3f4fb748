"""`ServerProbe`: asks a running vLLM server what base it holds. HTTP only, no vLLM import.

The server must load our worker extension and open vLLM's development routes, on a host that only you can reach (they
have no key of their own):

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model BASE --host 127.0.0.1 \\
        --worker-extension-cls qlora_rl.engine.worker.BaseExtension
"""

from __future__ import annotations

from typing import Any

from qlora_rl.contracts import BaseFingerprint, EngineCapabilities
from qlora_rl.errors import EngineBrokenError, EngineUnsupportedError

_HOW = (
    "Start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls qlora_rl.engine.worker.BaseExtension, on a host "
    "that only you can reach."
)


class ServerProbe:
    """What a server's base is, and the repair of its scales.

    Args:
        url: such as "http://127.0.0.1:8000".
        timeout_s: of one request, in seconds; a large base takes a while to digest.

    Raises:
        EngineBrokenError: nobody answers there, or not in time.
        EngineUnsupportedError: it answers, but cannot say what it holds; names how to start it.
    """

    def __init__(self, url: str, *, timeout_s: float = 300.0):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def describe_base(self) -> BaseFingerprint:
        """The base as the server's worker holds it."""
        return BaseFingerprint.from_dict(self._call("qlora_describe_base"))

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales of the server's own base directory into its weights, where its loader has rounded
        them."""
        return self._call("qlora_repair_scales")

    def capabilities(self) -> EngineCapabilities:
        """Only the name is known of a server that is merely asked."""
        return EngineCapabilities(f"the vLLM server at {self.url}", False, False, 0, 0, "unknown", False)

    def _call(self, method: str) -> dict[str, Any]:
        import httpx

        doing = f"asking the server at {self.url}"
        try:
            answer = httpx.post(f"{self.url}/collective_rpc", json={"method": method}, timeout=self.timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineBrokenError(
                f"{doing}: {error or type(error).__name__}. Is it running, and is the URL right?"
            ) from error
        if answer.status_code != 200:
            text = answer.text.strip().splitlines()
            raise EngineUnsupportedError(
                f"{doing}: status={answer.status_code} ({text[0][:200] if text else ''}). {_HOW}"
            )
        try:
            results = answer.json()["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineUnsupportedError(f"{doing}: it does not answer like vLLM. {_HOW}") from error
        if len(results) != 1:
            raise EngineUnsupportedError(
                f"{doing}: {len(results)} ranks hold it in parts, which only a server of `qlora-rl serve` compares "
                "with its own directory. Start it with that, and pass its --api-key-file."
            )
        return results[0]
