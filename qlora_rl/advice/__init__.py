"""What to train with: settings with their sources that fit on a card."""

from qlora_rl.advice.settings import TASKS, Recommendation, recommend

__all__ = ["TASKS", "Recommendation", "recommend"]
