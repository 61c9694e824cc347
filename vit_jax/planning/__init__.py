"""What a run needs before there is a machine for it: chips, compiled programs, estimates.

    chips.py     numbers of the vendors
    targets.py   devices to compile for, none of which need be there
    hlo.py       FLOPs and communicated bytes of a compiled program
    estimate.py  memory, time, and the largest batch
    report.py    what to change, and the text
"""
