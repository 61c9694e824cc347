"""The one table of chips: what each can do, by its vendor."""

from typing import NamedTuple


class Chip(NamedTuple):
    """What one jax device can do. Upper bounds: no program reaches all of them."""

    kinds: tuple[str, ...]  # parts of jax's device_kind, any of which identifies it
    flops: float | None  # dense bfloat16 FLOP/s
    memory: float | None  # bytes that a program may use
    bandwidth: float | None  # bytes/s of that memory
    link: float | None  # bytes/s that it sends to its neighbours, over all its links at once
    node: int = 0  # devices that reach each other over these links; 0: all of a slice
    network: float = 0.0  # bytes/s that a device sends to another node
    dims: int = 0  # axes of the torus of a TPU slice; 0: not a TPU
    largest: int = 0  # devices of the largest TPU slice


GIB = 2**30

# From TPU v4 on a device is the chip. Memory of TPUs is what libtpu 0.0.42 says a program may use
# (of 32, 16, 95 and 32 GiB); links are one direction, half of what is called bidirectional.
# Memory of GPUs is the data sheet's; beyond a node of eight each has a network adapter. Sources:
# table 4 of arXiv 2304.01433 for v4, https://cloud.google.com/tpu/docs/v5e, v5p and v6e;
# https://www.nvidia.com/en-us/data-center/a100 (80 GB, SXM), h100, h200 (SXM) and dgx-b200 (an
# eighth of it), and the pages of their DGX systems.
CHIPS = {
    'v4': Chip(('TPU v4',), 275e12, 30.75 * GIB, 1.2e12, 300e9, dims=3, largest=4096),
    'v5e': Chip(('TPU v5 lite', 'TPU v5e'), 197e12, 15.75 * GIB, 819e9, 200e9, dims=2, largest=256),
    'v5p': Chip(('TPU v5',), 459e12, 95.74 * GIB, 2765e9, 600e9, dims=3, largest=6144),
    'v6e': Chip(('TPU v6',), 918e12, 31.25 * GIB, 1600e9, 400e9, dims=2, largest=256),
    'a100': Chip(('A100',), 312e12, 80e9, 2039e9, 300e9, node=8, network=25e9),
    'h100': Chip(('H100',), 989e12, 80e9, 3350e9, 450e9, node=8, network=50e9),
    'h200': Chip(('H200',), 989e12, 141e9, 4800e9, 450e9, node=8, network=50e9),
    'b200': Chip(('B200',), 2250e12, 180e9, 8000e9, 900e9, node=8, network=50e9),
    'cpu': Chip(('cpu',), None, None, None, None),  # this machine: memory only, no times
}


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device kind such as 'NVIDIA H200', None where it is not known."""
    # v5e precedes v5p in the table, because 'TPU v5 lite' contains 'TPU v5'.
    return next(
        (chip.flops for chip in CHIPS.values() if any(kind in device_kind for kind in chip.kinds)),
        None,
    )


def send_rate(chip: Chip, devices: int) -> float | None:
    """Bytes/s that a device sends at most in a collective over `devices` devices.

    Between nodes a ring passes through all `node` adapters of a node side by side.
    """
    if chip.link is not None and chip.node and devices > chip.node:
        return min(chip.link, chip.node * chip.network)
    return chip.link
