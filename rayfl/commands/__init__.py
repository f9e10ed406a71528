"""What there is besides runs: clustering without training, newcomers to a finished run, an expert."""
