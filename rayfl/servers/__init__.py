"""The servers: the driver (GPS), the local parameter servers (LPS), and their records and checkpoints."""
