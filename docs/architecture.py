"""Draw docs/images/architecture.png: the packages of efx, and which imports which.

    python -m docs.architecture

An arrow that follows from others is left out: train -> data -> config.run shows that train imports
config.run.
"""

import ast
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]


def packages():
    """Return the rows of the contract "Imports go one way" in pyproject.toml, top first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings["contracts"][0]["layers"]


def package_of(module, names):
    """Return the package that has a module such as "efx.config.run", or None."""
    fitting = [name for name in names if f"{module}.".startswith(f"efx.{name}.")]
    return max(fitting, key=len, default=None)


def imports(names):
    """Return {package: packages that its modules import}."""
    found = {name: set() for name in names}
    folders = {"efx": ROOT / "efx", "efx.configs": ROOT / "configs"}
    for top, folder in folders.items():
        for path in folder.rglob("*.py"):
            importer = ".".join((top, *path.relative_to(folder).with_suffix("").parts))
            package = package_of(importer.removesuffix(".__init__"), names)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and package:
                    modules = [f"{node.module}.{alias.name}" for alias in node.names]
                    found[package] |= {package_of(module, names) for module in modules}
    return {name: others - {name, None} for name, others in found.items()}


def needed_arrows(edges, names):
    """Return the edges (importer, imported) that do not follow from others."""
    reached, arrows = {}, []
    for name in reversed(names):
        implied = set().union(*(reached[other] for other in edges[name]))
        reached[name] = edges[name] | implied
        arrows += [(name, other) for other in sorted(edges[name] - implied)]
    return arrows


def places(arrows, names):
    """Return {package: (x, y)}: one row below its lowest importer, near its importers."""
    height, place = {}, {}
    for name in names:
        height[name] = min((height[a] for a, b in arrows if b == name), default=1) - 1
    for y in sorted({*height.values()}, reverse=True):
        wanted = {}
        for name in (name for name in names if height[name] == y):
            importers = [place[a][0] for a, b in arrows if b == name]
            wanted[name] = sum(importers) / max(1, len(importers))
        middle = sum(wanted.values()) / len(wanted)
        for i, name in enumerate(sorted(wanted, key=wanted.get)):
            place[name] = middle + 1.2 * (i - (len(wanted) - 1) / 2), y
    return place


def draw(path):
    """Draw the picture."""
    from matplotlib.figure import Figure  # of the extra `studies`

    names = packages()
    arrows = needed_arrows(imports(names), names)
    place = places(arrows, names)
    xs, ys = zip(*place.values(), strict=True)
    figure = Figure(figsize=(8, 0.7 * (1 - min(ys))))
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[])
    axes.set(xlim=(min(xs) - 0.6, max(xs) + 0.6), ylim=(min(ys) - 0.5, 0.5))
    style = {"boxstyle": "round,pad=0.5", "facecolor": "#eaf1fb", "edgecolor": "#33557f"}
    for name, (x, y) in place.items():
        axes.text(x, y, name, ha="center", va="center", bbox=style, zorder=3)
    for a, b in arrows:  # from the lower edge of a box to the upper edge of another
        (x, y), (to_x, to_y) = place[a], place[b]
        arrow = {"arrowstyle": "-|>", "color": "#33557f", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (to_x, to_y + 0.22), (x, y - 0.2), arrowprops=arrow)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(ROOT / "docs/images/architecture.png")
