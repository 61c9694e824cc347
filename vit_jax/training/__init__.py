"""The run: from a config, data and weights to updates of a state, on whatever devices there are."""
