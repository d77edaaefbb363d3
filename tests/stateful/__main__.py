"""Random calls on shared objects: python -m tests.stateful --steps 50000 --seed 1 --minutes 10

Prints each kind of fault once, as the shortest sequence of steps that shows it, and how many steps
of each operation were answered and refused. The exit status is 1 if there is a fault.
"""

import argparse

from tests.stateful.machine import shrunk
from tests.stateful.world import World, walked

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--minutes", type=float, default=float("inf"))
parser.add_argument("--only", nargs="*", default=(), help="these operations alone")
parser.add_argument("--no-shrinking", action="store_true")
options = parser.parse_args()

walks = walked(options.seed, options.steps, options.minutes, options.only)
for key, (fault, seconds, steps) in walks.faults.items():
    print(f"\n{fault.operation}: {fault.kind} (after {seconds:.1f} s): {fault.note}")
    for step in steps if options.no_shrinking else shrunk(World, steps, key):
        print(f"    {step},")
print(f"\n{walks.steps} steps in {walks.seconds:.1f} s, {walks.steps / walks.seconds:.0f} a second")
for name, spent in walks.spent.most_common():
    counts = f"{walks.answered[name]:6} answered {walks.refused[name]:6} refused"
    print(f"{name:12} {spent:7.1f} s {counts}")
raise SystemExit(bool(walks.faults))
