"""Tinker's HTTP API (`tinker` 0.38) on one verified base: `qlora-rl tinker`."""

from qlora_rl.tinker.launch import serve_adapters

__all__ = ["serve_adapters"]
