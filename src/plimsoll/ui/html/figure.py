"""Traces and axes in, a plotly figure as plain data out, with what all charts of a page share.

Colours of text, grid and lines are left to the page's style sheet, which knows light, dark and paper.
"""

from __future__ import annotations

from typing import Any

HOVER = {"bgcolor": "#23272e", "bordercolor": "#5b636f", "font": {"color": "#ffffff", "size": 13}, "align": "left"}


def figure(
    traces: list[dict[str, Any]],
    *,
    x: dict[str, Any],
    y: dict[str, Any],
    height: int = 380,
    **layout: Any,
) -> dict[str, Any]:
    """A figure with a horizontal legend under it.

    Args:
        traces: plotly traces.
        x: the horizontal axis, beyond what all axes share.
        y: the vertical axis.
        height: pixels.
        layout: whatever else the layout needs.
    """
    common = {"automargin": True, "zeroline": False, "ticks": "", "title": {"standoff": 8}}
    return {
        "data": traces,
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 20, "t": 28, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif", "size": 13},
            "legend": {"orientation": "h", "x": 0, "y": -0.21, "yanchor": "top", "bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": HOVER,
            "xaxis": merged(common, x),
            "yaxis": merged(common, y),
            **layout,
        },
    }


def merged(common: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """``common`` overlaid with ``special``; titles keep the settings of both."""
    return {**common, **special, "title": {**common["title"], **special.get("title", {})}}
