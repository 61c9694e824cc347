"""The most memory that a process has had."""

import resource
import sys


def peak_resident() -> int:
    """Bytes of memory that this process has had resident at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak << 10  # elsewhere it is in KiB
