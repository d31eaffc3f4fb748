"""The engine, linked to the policy, and what it generates."""
