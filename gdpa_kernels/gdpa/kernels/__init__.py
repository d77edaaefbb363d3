"""Products: kernels with every option, and their fallbacks. `auto` takes one where a record ranks
it on the GPU at hand; the others, those for Blackwell among them, run by their names."""
