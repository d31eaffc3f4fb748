"""What to train with: settings with their sources that fit on a card, and the run's file that they make."""

from qlora_rl.advice.rows import Tables, tables_for
from qlora_rl.advice.run_file import chat_of, run_file
from qlora_rl.advice.settings import TASKS, Recommendation, recommend

__all__ = ["TASKS", "Recommendation", "Tables", "chat_of", "recommend", "run_file", "tables_for"]
