"""Memory estimate of a run, before anything is allocated: shapes of a model, lines, their sum."""
