"""A page that shows what each block does with each token of a text.

    python -m efx.studies.routing_map runs/mod --text 'def f(x):' --out map.html

For runs with decisions per token: depth routing, experts, learned dropout, gates, composed
adapters. The page needs a browser and nothing else. A strip of small maps, one for each block,
shows the text as each block decides about it (computed or skipped, gates, experts, the kept
fraction of masks, router scores), beside the loss and the entropy of each token; the selected one
colours the text. Blocks that are asleep, since their gates are closed, are marked. The decisions
are the causal ones of evaluation and sampling. All numbers are also in a CSV file beside the page,
a line for each token.

A text that is longer than the model's context is cut into windows, as evaluation does.
"""

import json
import math
import pathlib
import sys

import numpy as np
import pandas as pd

from efx import io, run_dir
from efx.config.load import config_of_model
from efx.errors import UsageError
from efx.logging import read_metrics
from efx.parallel import sharding
from efx.studies import cli, token_choices
from efx.train import health, inference
from efx.train.eval_step import evaluation_keys

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")
# The quantity that the page shows first: the first of these that the model has.
FIRST = ("computed", "kept", "top_expert", "gate")
SUMMARIES = {
    "depth": "number of routed blocks that compute the token",
    "loss": "loss of the next token, in nats",
    "entropy": "entropy of the predicted next token, in nats",
}


def map_of_run(workdir, text=None, tokens=512, step=None):
    """Return (TokenMap, ids, texts of the tokens, checkpoint step).

    Args:
      text: None: `tokens` of the held-out split, from the start of its first whole line.
    """
    if text is None and tokens < 1:
        raise UsageError(f"--tokens={tokens}: must be at least 1")
    config = config_of_model(workdir)
    splits = ("eval",) if text is None else ()
    built, step, params, variables = inference.restore(config, workdir, step, splits)
    variables = sharding.gather({"params": params, **variables})
    mapper = token_choices.TokenMapper(built.model, variables)
    if text is None:
        windows = _held_out_windows(built.data)
    else:
        windows = _text_windows(built.tokenizer, built.model.context, text)
    maps, ids, start = [], [], 0
    for index, (window, is_scored_T, options) in enumerate(windows):
        made = mapper(window, evaluation_keys(config.seed, index), **options)
        maps.append(made.at(is_scored_T))
        ids += np.asarray(window)[is_scored_T].tolist()
        if text is None and index == 0:
            start = line_start(token_texts(built.tokenizer, ids))
        if text is None and len(ids) >= start + tokens:
            break
    shown = slice(start, start + tokens if text is None else None)
    ids = ids[shown]
    return token_choices.join(maps).at(shown), ids, token_texts(built.tokenizer, ids), step


def _held_out_windows(data):
    """Yield (ids, whether each is scored, arguments of the mapper) of held-out rows."""
    for batch in data.eval_batches(1):
        weights_T = batch["weights"][0]
        end = np.flatnonzero(weights_T)[-1] + 1  # the last row of the split may be shorter
        packing = {
            f"{name}_BT": batch[name][:, :end]
            for name in ("positions", "segment_ids")
            if name in batch
        }
        options = {"next_id": batch["targets"][0, end - 1], **packing}
        yield batch["inputs"][0, :end], weights_T[:end] > 0, options


def _text_windows(tokenizer, length, text):
    """Yield the same for windows of at most `length` tokens of a text."""
    ids = [*tokenizer.start, *tokenizer.encode(text).tolist()]
    if not ids:
        raise UsageError("--text: is empty; use at least one token")
    for i in range(0, len(ids), length):
        window = ids[i : i + length]
        following = ids[i + length] if i + length < len(ids) else None
        yield window, np.full(len(window), True), {"next_id": following}


def line_start(texts):
    """Return the index of the first token after the end of a line; 0 without one."""
    ends = (i + 1 for i, text in enumerate(texts[:-1]) if text.rstrip(" ").endswith("\n"))
    return next(ends, 0)


def token_texts(tokenizer, ids):
    """Return one text for each token.

    A character split over several tokens is the text of the last one; bytes that are no UTF-8 are
    written `\\xff`, tokens without a text `⟨7⟩`, the end of a document `⟨end⟩`.
    """
    decoder, found, pending = tokenizer.stream_decoder(), [], 0
    for i in map(int, ids):
        text = "⟨end⟩" if i == tokenizer.eot else decoder.feed(i)
        found.append(text or "")
        pending = 0 if text else pending + 1
    for k in range(len(found) - pending, len(found)):
        found[k] = f"⟨{int(ids[k])}⟩"
    return found


def rows_of_page(token_map):
    """Return the rows of the page: {name, quantity, kind, values, is_asleep}, summaries first."""
    rows = []
    computed = token_map.values("computed")
    asleep = {
        row.name
        for row in token_map.rows
        if row.quantity == "gate" and is_gate_closed(row, computed)
    }

    def add(name, quantity, kind, values_T):
        values = [float(f"{x:.4g}") if math.isfinite(x) else None for x in values_T]
        row = {"name": name, "quantity": quantity, "kind": kind, "values": values}
        rows.append(row | {"is_asleep": name in asleep})

    if len(computed) > 1:
        all_NT = np.stack(list(computed.values()))
        depth_T = np.where(np.isnan(all_NT).all(axis=0), np.nan, np.nansum(all_NT, axis=0))
        add("all blocks", "depth", "count", depth_T)
    add("model", "loss", "number", token_map.loss_T)
    add("model", "entropy", "number", token_map.entropy_T)
    redundant = token_choices.redundant_quantities(token_map.rows)
    for row in token_map.rows:
        values_T = row.values_T
        if row.quantity == "gate" and row.name in computed:
            values_T = np.where(computed[row.name] > 0, values_T, np.nan)
        if row.quantity not in redundant:
            add(row.name, row.quantity, token_choices.QUANTITIES[row.quantity][0], values_T)
    return rows


def is_gate_closed(row, computed):
    """Return whether the mean gate of the computed tokens is below `health.NEGLIGIBLE`."""
    gates = np.abs(row.values_T[computed.get(row.name, np.isfinite(row.values_T)) > 0])
    return bool(gates.size and np.mean(gates) < health.NEGLIGIBLE)


def page(workdir, text=None, tokens=512, step=None):
    """Return (the page as HTML, its rows as a DataFrame)."""
    token_map, ids, texts, step = map_of_run(workdir, text, tokens, step)
    rows = rows_of_page(token_map)
    about = f"Step {step}, {len(ids):,} tokens" + (" of held-out text" if text is None else "")
    logged = [row for row in read_metrics(workdir) if row["step"] == step]
    if logged and (worth := logged[0].get("eval/router/worth")) is not None:
        about += f". Switching all routed blocks off costs {worth:.3f} nats a token"
    quantities = {row["quantity"] for row in rows}
    meanings = {name: meaning for name, (_, meaning) in token_choices.QUANTITIES.items()}
    data = {
        "title": f"Routing map of {pathlib.Path(workdir).resolve().name}",
        "about": f"{about}.",
        "first": next((name for name in FIRST if name in quantities), "loss"),
        "meanings": meanings | SUMMARIES,
        "tokens": texts,
        "ids": ids,
        "rows": rows,
    }
    # "<" could end the script.
    script = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    table = pd.DataFrame({f"{row['name']} {row['quantity']}": row["values"] for row in rows})
    table.insert(0, "token", texts)
    return TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/ null", script), table


def study(arguments):
    _ = run_dir.RunDir(arguments.run).config  # raises unless it is a run
    out = cli.output_file(arguments.out, ".html")
    text, table = page(arguments.run, arguments.text, arguments.tokens, arguments.step)
    io.write_atomic(out, text)
    table.to_csv(out.with_suffix(".csv"), index=False, errors="backslashreplace")
    classes = [name for name in table if name.endswith(" top_expert")]
    print(
        table.drop(columns=classes).mean(numeric_only=True).to_string(float_format="{:.3f}".format)
    )
    print(f"written: {out}, {out.with_suffix('.csv')}")


def main(argv=None):
    parser = cli.Parser("efx.studies.routing_map", __doc__)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--text", help="the text (default: the start of the held-out split)")
    parser.add_argument("--tokens", type=int, default=512, help="of held-out text (512)")
    parser.add_argument("--out", default="routing_map.html", help="page (default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
