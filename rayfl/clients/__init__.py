"""What runs at a client: the host of its block, the messages to it, its state."""
