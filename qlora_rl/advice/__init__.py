"""What to train with: settings with their sources that fit on a card, and the run's file that they make."""

from qlora_rl.advice.chat import Chat, chat_of
from qlora_rl.advice.rows import Tables, is_adapter, tables_for, tables_from
from qlora_rl.advice.run_file import run_file
from qlora_rl.advice.settings import Recommendation, recommend

__all__ = [
    "Chat",
    "Recommendation",
    "Tables",
    "chat_of",
    "is_adapter",
    "recommend",
    "run_file",
    "tables_for",
    "tables_from",
]
