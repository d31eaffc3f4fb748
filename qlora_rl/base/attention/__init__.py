"""Attention of the trainer's models: sequences one behind the other, softcapped scores; and which implementation a
model can have."""
