"""Draw the decisions of a model for each token of a text: a page to explore, or a picture.

    python -m efx.studies.token_map --workdir runs/mod --text 'def f(x):' --out map.html

For runs with decisions per token: depth routing, experts, learned dropout, gates and composed
experts; and for a cBTM ensemble. The page shows the text, coloured by the entropy or the loss of
the next token, and a grid of tokens by blocks: computed or skipped, fraction kept by masks,
experts, gates, router scores. Pointing at a token shows its path through the blocks.
--out map.png draws one quantity (--quantity). All numbers, of the causal decisions of evaluation
and sampling, go to a CSV file beside it with a line for each token.
"""

import csv
import itertools
import math
import pathlib
import re
import sys

import numpy as np

from efx import io, run_dir
from efx.composition import CLUSTERS
from efx.config.load import config_of_run, to_config
from efx.errors import UsageError, nearest
from efx.parallel import sharding
from efx.studies import cli, page, token_choices, token_ensemble, token_text
from efx.train import setup
from efx.train.step import evaluation_keys

HELD_OUT = 256  # tokens of the held-out split that are shown without a text
LINE = 64  # tokens in a line of the picture


# ---- the text ------------------------------------------------------------------------------------


def held_out(data):
    """(first tokens of the held-out split, of one document; the token after them)."""
    batch = next(iter(data.eval_batches(1, 1)))
    ids_T, target_T = batch["inputs"][0], batch["targets"][0]
    end = min(HELD_OUT, int(np.sum(batch["weights"][0])))  # a text may be shorter than a row
    if "segment_ids" in batch:
        segment_T = batch["segment_ids"][0]
        end = min(end, int(np.argmin(np.append(segment_T == segment_T[0], False))))
    return ids_T[:end].tolist(), int(target_T[end - 1])


def tokens_of(tokenizer, text, data, context):
    """(ids, next token or None) of --text, or of the held-out split if it is None."""
    ids, after = held_out(data()) if text is None else (_encoded(tokenizer, text), None)
    if not 1 <= len(ids) <= context:
        raise UsageError(f"--text: {len(ids)} tokens; must have from 1 to {context}")
    return ids, after


def _encoded(tokenizer, text):
    if not text:
        return []
    try:
        return [*tokenizer.start, *tokenizer.encode(text).tolist()]
    except UsageError as error:
        raise UsageError(f"--text: {error}") from error


def map_of_run(workdir, text, step=None):
    """(`TokenMap`, ids, [Piece], description of the model) of a run directory."""
    config = config_of_run(workdir)
    if (pathlib.Path(workdir) / CLUSTERS).is_dir():
        from efx.composition.ensemble import Ensemble

        config = to_config(config)
        ensemble = Ensemble(config, workdir, step)

        def held_out_text():
            return ensemble.load_expert(0, splits=("eval",))[0].data

        context = ensemble.load_expert(0)[0].model.context
        ids, after = tokens_of(ensemble.tokenizer, text, held_out_text, context)
        made = token_ensemble.token_map(ensemble, config, ids, after)
        words = f"{ensemble.count} experts, top {config.ensemble.top_k}"
        return made, ids, token_text.pieces(ensemble.tokenizer, ids), words
    splits = ("eval",) if text is None else ()
    built, step, params, variables = setup.finished(config, workdir, step, splits)
    ids, after = tokens_of(built.tokenizer, text, lambda: built.data, built.model.context)
    variables = sharding.gather({"params": params, **variables})
    keys = evaluation_keys(config.seed, 0)
    made = token_choices.token_map(built.model, variables, ids, keys, after)
    return made, ids, token_text.pieces(built.tokenizer, ids), f"step {step}"


# ---- numbers -------------------------------------------------------------------------------------


def write_csv(path, made, pieces):
    """Write a line for each token; a piece of several tokens is in the line of the first."""
    texts = [text for piece in pieces for text in (piece.text, *[""] * (piece.count - 1))]
    columns = {
        "entropy": made.entropy_T,
        "loss": made.loss_T,
        **{f"{row.name} {row.quantity}": row.values_T for row in made.rows},
    }
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(["token", *columns])
        for text, values in zip(texts, zip(*columns.values(), strict=True), strict=True):
            writer.writerow([text, *("" if math.isnan(x) else f"{x:.6g}" for x in values)])


def describe(made):
    """Yield lines with the mean of each row."""
    yield f"  entropy {made.entropy_T.mean():.3f} nats"
    for row in made.rows:
        kind = made.quantities[row.quantity].kind
        if kind == "class":
            used = np.unique(row.values_T[~np.isnan(row.values_T)])
            mean = f"{len(used)} different"
        else:
            mean = np.nanmean(row.values_T) if not np.isnan(row.values_T).all() else math.nan
            mean = f"{mean:.1%}" if kind in ("flag", "fraction") else f"{mean:.3f}"
        yield f"  {row.name + ' ' + row.quantity:<40} {mean}"


# ---- a picture -----------------------------------------------------------------------------------


def draw(made, pieces, quantity, path):
    """Draw the rows of one quantity over the tokens."""
    import matplotlib.figure  # takes half a second
    from matplotlib import font_manager
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    glyphs = font_manager.get_font(font_manager.findfont("monospace")).get_charmap()
    rows, about = made.of(quantity), made.quantities[quantity]
    values = np.stack(list(rows.values()))
    length = values.shape[1]
    lines = [slice(start, start + LINE) for start in range(0, length, LINE)]
    height = 0.22 * len(rows) + 1.0
    figure = matplotlib.figure.Figure((14, height * len(lines) + 0.6), layout="constrained")
    axes = figure.subplots(len(lines), 1, squeeze=False)[:, 0]
    if about.by_row:
        values = _by_row(values)
    low, high, colours = _range(values, about.kind)
    discrete = about.kind in ("flag", "count", "class")
    if discrete:
        shades = matplotlib.colormaps["tab20" if about.kind == "class" else "Blues"]
        number = int(high) + 1
        if about.kind == "class":
            chosen = [shades(i % 20) for i in range(number)]
        else:
            chosen = [shades(x) for x in np.linspace(0.15, 0.85, number)]
        colours, low, high = ListedColormap(chosen), -0.5, number - 0.5
    for axis, line in zip(axes, lines, strict=True):
        image = axis.imshow(values[:, line], vmin=low, vmax=high, cmap=colours, aspect="auto")
        places, shown = _ticks(pieces, line, glyphs)
        axis.set_xticks(places, shown, fontsize=8, family="monospace", rotation=90)
        axis.set_xlim(-0.5, LINE - 0.5 if len(lines) > 1 else values[:, line].shape[1] - 0.5)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axis.tick_params(length=0)
    if discrete:
        names = about.words or [str(i) for i in range(number)]
        patches = [Patch(color=c, label=name) for c, name in zip(chosen, names, strict=True)]
        options = dict(loc="outside upper right", ncols=min(len(patches), 12), fontsize=8)
        figure.legend(handles=patches, **options)
        figure.suptitle(f"{about.title}: {about.about}", fontsize=9, x=0.01, ha="left")
    else:
        label = about.title + ",\nover the row's maximum" * about.by_row
        colorbar = figure.colorbar(image, ax=list(axes), shrink=0.5, pad=0.01)
        colorbar.set_label(label, fontsize=8)
    figure.savefig(path, dpi=110)


def _by_row(values):
    """Each row divided by its largest absolute value."""
    largest = np.nanmax(np.abs(values), axis=1, initial=0.0, keepdims=True)
    return values / np.where(largest > 0, largest, 1.0)


def _range(values, kind):
    """(lowest value, highest value, colour map) of the picture."""
    if kind == "flag":
        return 0, 1, None
    if kind == "fraction":
        return 0.0, 1.0, "viridis"
    seen = values[~np.isnan(values)]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (0.0, 1.0)
    if kind in ("count", "class"):
        return 0, high, None
    if low < 0:
        size = max(-low, high)
        return -size, size, "RdBu"
    return 0.0, max(high, 1.0), "viridis"


def _ticks(pieces, line, glyphs):
    """(positions in a line of the picture, texts) of the pieces that begin there.

    Args:
      glyphs: code points of the font; others are written as numbers.
    """
    places, texts = [], []
    starts = itertools.accumulate((piece.count for piece in pieces), initial=0)
    for start, piece in zip(starts, pieces, strict=False):
        if line.start <= start < line.stop:
            places.append(start - line.start + min(piece.count - 1, line.stop - start - 1) / 2)
            texts.append(_drawable(visible(piece.text), glyphs).replace("$", r"\$"))
    return places, texts


def _drawable(text, glyphs):
    """A text with numbers for characters that the font lacks, cut to the length of `visible`."""
    parts = [c if ord(c) in glyphs else f"u{ord(c):x}" for c in text]
    if sum(map(len, parts)) <= _LONGEST:
        return "".join(parts)
    ends = itertools.accumulate(map(len, parts))
    return "".join(part for part, end in zip(parts, ends, strict=True) if end < _LONGEST) + "…"


def visible(text):
    """A short text of one line with visible white space."""
    text = re.sub(r" {4,}", lambda run: f"·×{len(run[0])}", text)
    text = "".join(_SPACES.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


_LONGEST = 12
_SPACES = {" ": "·", "\n": "↵", "\t": "→"}


# ---- a page --------------------------------------------------------------------------------------


def sections(made, ids, pieces):
    """Sections for `page.write_page`."""
    data = {
        "pieces": [
            {"text": piece.text, "short": visible(piece.text), "count": piece.count}
            for piece in pieces
        ],
        "ids": [int(i) for i in ids],
        "names": list(dict.fromkeys(row.name for row in made.rows)),
        "entropy": _plain(made.entropy_T),
        "loss": _plain(made.loss_T),
        "served": {
            name: [[[e, round(weight, 3)] for e, weight in of_token] for of_token in of_tokens]
            for name, of_tokens in made.served.items()
        },
        "quantities": [
            {
                "key": key,
                "title": quantity.title,
                "about": quantity.about,
                "kind": quantity.kind,
                "words": list(quantity.words),
                "by_row": quantity.by_row,
                "names": list(made.of(key)),
                "values": [_plain(values_T) for values_T in made.of(key).values()],
            }
            for key, quantity in made.quantities.items()
        ],
        "colours": list(page.COLOURS),
    }
    block = page.Block("token_map.html", {}, script="token_map.js", data=data)
    return [page.Section("Tokens and blocks", [block])]


def _plain(values_T):
    """A list for JSON, which has no NaN."""
    return [None if math.isnan(x) else float(f"{x:.4g}") for x in values_T]


# ---- the command ---------------------------------------------------------------------------------


def main(argv=None):
    parser = cli.Parser("efx.studies.token_map", __doc__)
    parser.add_argument("--workdir", required=True, help="run directory")
    parser.add_argument("--text", help="the text (default: the start of the held-out split)")
    parser.add_argument("--out", help="page or picture (default: WORKDIR/token_map.html)")
    parser.add_argument("--quantity", help="quantity of a picture (default: the first one)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(run, argv)


def run(arguments):
    run_dir.recorded_config(arguments.workdir)  # which names the flag that is given
    out = _output(arguments.out or str(pathlib.Path(arguments.workdir) / "token_map.html"))
    if arguments.quantity is not None and out.suffix == ".html":
        raise UsageError(
            "--quantity: a page shows all quantities; use --out with a picture's ending"
        )
    made, ids, pieces, about = map_of_run(arguments.workdir, arguments.text, arguments.step)
    quantity = arguments.quantity or next(iter(made.quantities))
    if quantity not in made.quantities:
        raise UsageError(
            f"--quantity={quantity}: expected one of "
            f"{', '.join(made.quantities)}{nearest(quantity, made.quantities)}"
        )
    numbers = out.with_suffix(".csv")
    with io.report_write_errors(out):
        write_csv(numbers, made, pieces)
        if out.suffix == ".html":
            name = pathlib.Path(arguments.workdir).resolve().name
            source = f"{arguments.command}: {about}, {len(ids)} tokens"
            page.write_page(out, f"Tokens of {name}", sections(made, ids, pieces), source)
        else:
            draw(made, pieces, quantity, out)
    print(f"{about}, {len(ids)} tokens: {out} and {numbers}")
    print("\n".join(describe(made)))


def _output(out):
    """The path of --out, checked before anything is computed."""
    path = pathlib.Path(out)
    return page.output(out) if path.suffix.lower() == ".html" else cli.picture(out)


if __name__ == "__main__":
    sys.exit(main())
