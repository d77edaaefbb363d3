"""What chapters use beside the lab: studies, drawings, tables, what a compiler makes of a kernel."""
