"""What single chapters use: their own tables, counts and microbenchmarks."""
