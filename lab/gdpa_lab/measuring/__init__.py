"""What a number is made from: workloads, inputs, checks, timings, records."""
