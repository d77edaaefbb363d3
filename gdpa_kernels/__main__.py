"""`python -m gdpa_kernels`: what runs on this machine, why the rest does not, and how to repair it.

Exit status: 1 if something needs repair.
"""

import sys

from gdpa_kernels import doctor


def main() -> int:
    """Print the report of the doctor and return the exit status."""
    findings = doctor.findings()
    sys.stdout.write(doctor.report(findings))
    return 1 if doctor.repairs(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
