"""The most memory that a process has had."""

import resource
import sys


def peak_resident() -> int:
    """The peak of this process's resident memory, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak << 10  # elsewhere it is in KiB
