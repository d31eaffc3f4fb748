"""The trainers: thin over TRL. The only room that knows it."""
