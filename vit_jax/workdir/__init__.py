"""What a run writes and reads back: its record, checkpoints, metrics, curves, log lines."""
