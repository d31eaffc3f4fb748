"""What a run has trained: opened (`trained`), talked to (`chat`), measured (`evaluation`)."""
