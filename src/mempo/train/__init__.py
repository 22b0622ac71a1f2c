"""Training on one machine: behaviour cloning, MemPO, checkpoints."""
