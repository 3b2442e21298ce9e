"""How many of an optimizer's updates a JAX device computes, from measured rates.

    drive ─► host's memory ─► the host's cores, or up ─► device ─► down ─► drive

Of every k subgroups the device computes one. Drive, cores, device and each way of the
link work at the same time, so the slowest of them sets the time of all updates.

Invariant: a choice is a pure function of the rates.
"""

import math
from typing import NamedTuple

_LEAST_GAIN = 0.05


class UpdateRates(NamedTuple):
    """Seconds for a param.

    Attributes:
      host: Of the host's update, on all its cores.
      handled: Of the host's cores for what the device updates: copies and checksums.
      device: Of the device: its update or its copies of one way, whichever is longer.
      drive: Of drives, which read and write the state.
    """

    host: float
    handled: float
    device: float
    drive: float


def update_s(rates: UpdateRates, every: int) -> float:
    """Returns the seconds of a param's update, on average.

    Args:
      every: The device computes every so many subgroups; 0 for none.
    """
    share = 1 / every if every else 0.0
    host_s = (1 - share) * rates.host + share * rates.handled
    return max(rates.drive, host_s, share * rates.device)


def interval(rates: UpdateRates) -> int:
    """Returns the smallest number at which the host never waits for the device.

    It is 0, for no update on the device, if drives are the bound, or if the device
    would save less than 5 % of the time.
    """
    if rates.drive >= rates.host:
        return 0
    late = max(0.0, rates.device - rates.handled)
    if not math.isfinite(late) or late >= rates.host * (1 << 16):
        return 0
    every = math.ceil(1 + late / rates.host - 1e-9)
    gained = 1 - update_s(rates, every) / update_s(rates, 0)
    return every if gained >= _LEAST_GAIN else 0
