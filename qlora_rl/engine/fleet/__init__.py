"""Several engines as one: servers, or actors of a Ray cluster."""

from qlora_rl.engine.fleet.engine import Fleet, connect
from qlora_rl.engine.fleet.ray_connection import require_ray
from qlora_rl.engine.fleet.ray_fleet import RayFleet

__all__ = ["Fleet", "RayFleet", "connect", "require_ray"]
