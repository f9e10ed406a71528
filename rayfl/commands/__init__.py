"""Commands other than runs: clustering without training, newcomers to a run, an expert, skeletons."""
