"""A trained policy as files for others, each loaded again and compared before it appears."""
