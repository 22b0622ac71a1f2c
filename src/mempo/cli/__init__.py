"""The command line: the only place that wires concrete classes together."""
