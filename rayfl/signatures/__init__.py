"""What a client reveals about its data before training: one kind of signature a file."""
