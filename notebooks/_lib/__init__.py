"""What chapters use beside the lab: studies, drawings, tables, counts of compiled code."""
