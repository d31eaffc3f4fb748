"""Several engines as one: servers, or actors of a Ray cluster."""

from qlora_rl.engine.fleet.engine import Fleet
from qlora_rl.engine.fleet.ray_fleet import RayFleet
from qlora_rl.engine.fleet.ray_replica import require_ray

__all__ = ["Fleet", "RayFleet", "require_ray"]
