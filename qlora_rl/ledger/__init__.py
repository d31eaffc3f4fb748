"""What a run will hold in memory, counted before anything is allocated: shapes of a model, lines, the ledger."""
