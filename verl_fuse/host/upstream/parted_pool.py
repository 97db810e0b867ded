"""Makes a part of verl's resource pool a pool of its own, so that one model's workers are on some of the devices."""

from typing import Any

from verl.single_controller.ray.base import ResourcePoolManager, split_resource_pool
from verl.utils.device import get_device_name


class PartedPools(ResourcePoolManager):
    """The pools of `pools`, and for `role` these `devices`, by their number, of the pool that it is in there."""

    def __init__(self, pools: ResourcePoolManager, role: Any, devices: range) -> None:
        self._whole, self._part, self._devices = pools.mapping[role], f"{role}_pool", devices
        super().__init__(pools.resource_pool_spec, pools.mapping | {role: self._part})

    def create_resource_pool(self) -> None:
        """Create the pools as verl does, which then knows one pool more; the pool has no devices that are not counted
        already."""
        super().create_resource_pool()
        pool = self.resource_pool_dict[self._whole]
        # verl returns placement groups unsorted once, and sorted by node from then on: a part must be cut from the
        # sorted groups.
        pool.get_placement_groups(device_name=get_device_name())
        before, after = self._devices.start, pool.world_size - self._devices.stop
        parts = split_resource_pool(pool, [before, len(self._devices), after])
        self.resource_pool_dict[self._part] = parts[1]
