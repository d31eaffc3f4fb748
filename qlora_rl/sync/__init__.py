"""How a new policy is synced to the engine: the plan, the strategies, the transports. Uses engines through contracts
only."""
