"""Products: what `auto` runs, and the fallbacks, with every option."""
