"""The calls of pyxrt in each release of XRT; the stand-in refuses the others.

Invariant: every line was read in XRT's public history, ``pyxrt.cpp`` below
``src/python/pybind11`` at the tags that `TAGS` names; nothing here is from memory.
"""

TAGS = {
    "2.8": "202020.2.8.832",
    "2.11": "202110.2.11.722",
    "2.12": "202120.2.12.447",
    "2.13": "202210.2.13.479",
    "2023.2": "202320.2.16.204",
    "2024.2": "202420.2.18.179",
    "2025.2": "202520.2.20.197",
    "2026.1": "202610.2.23.244",
}
"""Releases in their order, with the tag of XRT's repository that was read for each.

AMD names releases by their year since 2.9. Releases that distributions ship under a
number keep it here."""

RELEASES = ("2.8", "2.13", "2023.2", "2024.2", "2026.1")
"""The releases that the stand-in can imitate."""

CALLS = {
    # In every release that has pyxrt.
    "device(index)": "2.8",
    "device.load_xclbin(path)": "2.8",
    "kernel(device, uuid, name)": "2.8",
    "kernel.group_id": "2.8",
    "run.set_arg": "2.8",
    "run.start": "2.8",
    "run.state": "2.8",
    "bo(device, size, flags, group)": "2.8",
    "bo(bo, size, offset)": "2.8",
    "bo.sync(direction, size, offset)": "2.8",
    "bo.size": "2.8",
    "bo.address": "2.8",
    # Earlier releases have flags as numbers, and copy a buffer's contents, not map it.
    "bo.flags": "2.11",
    "bo.map": "2.11",
    "xclbin": "2.11",
    "device.load_xclbin(xclbin)": "2.11",
    "xclbin.get_kernels": "2.12",
    "device(address)": "2.12",
    "device.get_info": "2.12",
    "xrt_info_device": "2.12",
    "hw_context": "2023.2",
    "device.register_xclbin": "2023.2",
    "kernel(hw_context, name)": "2023.2",
    "bo.sync(direction)": "2023.2",
    "run.wait2": "2025.2",
    "bo(hw_context, size, flags, group)": "2026.1",
}
"""The first release that has a call, by call. 2026.1 still accepts the two that it has
replaced, `device.load_xclbin` and `kernel` of a device, with a DeprecationWarning."""

DEPRECATED_SINCE = "2026.1"

_ORDER = list(TAGS)


def has_call(release: str, call: str) -> bool:
    return _ORDER.index(CALLS[call]) <= _ORDER.index(release)


def deprecates(release: str) -> bool:
    """Whether a release warns of calls that contexts have replaced."""
    return _ORDER.index(DEPRECATED_SINCE) <= _ORDER.index(release)
