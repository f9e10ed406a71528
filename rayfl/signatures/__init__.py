"""What a client reveals about its data before training: one signature per file."""
