"""Where the texts of a matplotlib figure are."""

from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text


def crossing(figure: Figure) -> list[str]:
    """Name the texts that lie outside the canvas, and the pairs that cover one another."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    outside = [
        f"{name} is outside" for name, box in boxes
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]  # fmt: skip
    return outside + [
        f"{one} on {other}" for (one, a), (other, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2
    ]  # fmt: skip
