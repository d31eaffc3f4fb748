"""How a new policy reaches the engine: the plan, the strategies, the transports. Meets engines through contracts only."""
