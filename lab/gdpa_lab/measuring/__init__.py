"""The parts behind a number: workloads, inputs, checks, timings, records."""
