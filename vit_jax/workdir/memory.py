"""The peak memory of this process."""

import resource
import sys


def peak_resident() -> int:
    """The peak of the resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == 'darwin':
        return peak
    return peak << 10  # other systems report KiB
