"""What is installed, what of it fits together, and what this machine can do: one screen to paste into a bug report.

examination.py   examine: all checks, as an Examination
requirements.py  installed versions against the ranges of qlora-rl's own metadata
machine.py       processor, memory, disks, network, environment
trials.py        libraries imported and used, in a process of their own
"""

from qlora_rl.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
