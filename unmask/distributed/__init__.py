"""Several processes as one: shares of a batch, sums and gathers, and sharded weights (FSDP2). Imports util and core."""
