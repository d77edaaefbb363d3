"""The file that the reader gets, made from the solution, so that the two cannot drift apart.

In a solution `# >>> TEXT` opens a hole and `# <<<` closes it. Further comments right after it are
its text, lines `# blank: CODE` what the reader's file has there instead; `pass` without any. A hole
without a text is a planted mistake: the reader's file has that code, and nothing says so.
"""

import re

OPEN = "# your code"


def blank_of(solution: str) -> str:
    """Replace the holes of a solution by what the reader begins with."""
    blank: list[str] = []
    lines = iter(solution.splitlines())
    number = 0
    for line in lines:
        opened = re.match(r"(\s*)# >>>(.*)", line)
        if not opened:
            blank.append(line)
            continue
        indent, text = opened.groups()
        texts, code, is_solved = [text.strip()], [], False
        for inner in lines:
            bare = inner.strip()
            if bare == "# <<<":
                break
            if bare.startswith("# blank: "):
                code.append(inner[len(indent) :].removeprefix("# blank: "))
            elif bare.startswith("# ") and not is_solved:
                texts.append(bare[2:])
            else:
                is_solved = True
        if not texts[0]:
            blank += [indent + each for each in code]
            continue
        number += 1
        blank.append(f"{indent}# {number}. {texts[0]}")
        blank += [f"{indent}#    {each}" for each in texts[1:]]
        blank += [f"{indent}{each}  {OPEN}" for each in code or ["pass"]]
    return "\n".join(blank) + "\n"


def clean(solution: str) -> str:
    """Remove the markers from a solution, as it is shown."""
    shown = (x for x in solution.splitlines() if not re.match(r"\s*# (<<<|blank: |>>>$)", x))
    return "\n".join(re.sub(r"# >>> ", "# ", line) for line in shown) + "\n"


def open_lines(text: str, blank: str) -> list[int]:
    """List the lines of a reader's file that are holes of its blank as they were."""
    holes = {line.strip() for line in blank.splitlines() if line.endswith(OPEN)}
    return [i for i, line in enumerate(text.splitlines(), 1) if line.strip() in holes]


def edited(text: str, edits: list[tuple[str, str]]) -> str:
    """Replace each (old, new), which must occur; ValueError if one does not."""
    for old, new in edits:
        if old not in text:
            raise ValueError(f"the solution must have the text of an edit, got none of {old!r}")
        text = text.replace(old, new)
    return text
