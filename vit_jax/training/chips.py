"""The table of chips: speed, memory and links according to the vendors' data sheets."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Upper bounds for one JAX device, which no program reaches all at the same time.

    Attributes:
      kinds: substrings of JAX's device_kind; any of them identifies the chip.
      flops: dense bfloat16 FLOP/s.
      memory: bytes that a program may use.
      bandwidth: bytes/s of the memory.
      link: bytes/s that a device sends to its neighbours over all of its links together.
      node: number of devices that these links connect; 0 for a whole TPU slice.
      network: bytes/s that a device sends to another node.
      dims: number of axes of the torus of a TPU slice; 0 for other chips.
      largest: number of devices of the largest TPU slice.
    """

    kinds: tuple[str, ...]
    flops: float | None
    memory: float | None
    bandwidth: float | None
    link: float | None
    node: int = 0
    network: float = 0.0
    dims: int = 0
    largest: int = 0


GIB = 2**30

# Since TPU v4 a device is a chip. libtpu 0.0.42 reports the TPU memory that a program may use (of
# 32, 16, 95 and 32 GiB). Link rates are for one direction, half of the bidirectional rates. GPU
# memory is from the data sheets; every GPU has its own network adapter to other nodes.
# Sources: arXiv 2304.01433, table 4, for v4; https://cloud.google.com/tpu/docs/v5e, v5p and v6e;
# https://www.nvidia.com/en-us/data-center/a100 (80 GB, SXM), h100, h200 (SXM) and dgx-b200 (one
# eighth), and the pages of the DGX systems.
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
    """Peak bfloat16 FLOP/s of a device kind such as 'NVIDIA H200'; None for unknown kinds."""
    # v5e precedes v5p in the table, because 'TPU v5 lite' contains 'TPU v5'.
    for chip in CHIPS.values():
        if any(kind in device_kind for kind in chip.kinds):
            return chip.flops
    return None


def send_rate(chip: Chip, devices: int) -> float | None:
    """Bytes/s that a device sends at most in a collective over `devices` devices.

    A ring between nodes uses all network adapters of a node in parallel.
    """
    if chip.link is not None and chip.node and devices > chip.node:
        return min(chip.link, chip.node * chip.network)
    return chip.link
