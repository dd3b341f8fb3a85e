"""A page that shows what each block does with each token of a text.

    python -m efx.studies.routing_map runs/mod --text 'def f(x):' --out map.html

For runs with decisions per token: depth routing, experts, learned dropout, gates, composed
adapters. The page needs a browser and nothing else. It colours the text by one row: how many blocks
compute the token, its entropy or loss, or what a block decides (computed or skipped, experts, the
kept fraction of masks, router scores). Rows of closed gates are marked. The decisions are the
causal ones of evaluation and sampling. All numbers are also in a CSV file beside the page, a line
for each token.
"""

import json
import math
import pathlib
import sys

import numpy as np
import pandas as pd

from efx import io, run_dir
from efx.errors import UsageError
from efx.parallel import sharding
from efx.studies import cli, token_choices
from efx.train import health, inference
from efx.train.eval_step import evaluation_keys

TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def map_of_run(workdir, text=None, tokens=512, step=None):
    """Return (TokenMap, ids, texts of the tokens, checkpoint step).

    Args:
      text: None: the start of the held-out split, `tokens` of them.
    """
    config = cli.config_of_model(workdir)
    splits = ("eval",) if text is None else ()
    built, step, params, variables = inference.restore(config, workdir, step, splits)
    if text is None:
        ids, following = _held_out(built.data, max(0, min(tokens, built.model.context)))
    else:
        ids, following = [*built.tokenizer.start, *built.tokenizer.encode(text).tolist()], None
    if not 1 <= len(ids) <= built.model.context:
        flag = "--tokens" if text is None else "--text"
        raise UsageError(f"{flag}: {len(ids)} tokens; use 1 to {built.model.context}")
    variables = sharding.gather({"params": params, **variables})
    keys = evaluation_keys(config.seed, 0)
    token_map = token_choices.TokenMapper(built.model, variables)(ids, keys, following)
    return token_map, [int(i) for i in ids], token_texts(built.tokenizer, ids), step


def _held_out(data, count):
    """Return (the first tokens of the held-out split, of one document; the token after them)."""
    batch = next(iter(data.eval_batches(1, 1)))
    ids_T, target_T = batch["inputs"][0], batch["targets"][0]
    end = min(count, int(np.sum(batch["weights"][0])))  # a text may be shorter than a row
    if "segment_ids" in batch:
        segment_T = batch["segment_ids"][0]
        end = min(end, int(np.argmin(np.append(segment_T == segment_T[0], False))))
    return ids_T[:end].tolist(), int(target_T[end - 1])


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
    """Return the rows of the page: {name, quantity, kind, meaning, values}, the summaries first."""
    rows = []

    def add(name, quantity, kind, meaning, values_T, is_closed=False):
        values = [float(f"{x:.4g}") if math.isfinite(x) else None for x in values_T]
        rows.append({"name": name, "quantity": quantity, "kind": kind, "meaning": meaning}
                    | {"values": values, "is_closed": is_closed})  # fmt: skip

    if computed := token_map.values("computed"):
        depth_T = np.nansum(list(computed.values()), axis=0)
        meaning = "number of routed blocks that compute the token"
        add("all routed blocks", "computed", "count", meaning, depth_T)
    add("model", "entropy", "number", "entropy of the next token, in nats", token_map.entropy_T)
    add("model", "loss", "number", "loss of the next token, in nats", token_map.loss_T)
    for row in token_map.rows:
        kind, meaning = token_choices.QUANTITIES[row.quantity]
        is_closed = row.quantity == "gate" and is_gate_closed(row, computed)
        add(row.name, row.quantity, kind, meaning, row.values_T, is_closed)
    return rows


def is_gate_closed(row, computed):
    """Return whether the mean gate of the computed tokens is below `health.NEGLIGIBLE`."""
    gates = np.abs(row.values_T[computed.get(row.name, np.isfinite(row.values_T)) > 0])
    return bool(gates.size and np.mean(gates) < health.NEGLIGIBLE)


def page(workdir, text=None, tokens=512, step=None):
    """Return (the page as HTML, its rows as a DataFrame)."""
    token_map, ids, texts, step = map_of_run(workdir, text, tokens, step)
    rows = rows_of_page(token_map)
    name = pathlib.Path(workdir).resolve().name
    data = {"title": f"Routing map of {name}", "about": f"step {step}, {len(ids)} tokens"}
    data |= {"tokens": texts, "ids": ids, "rows": rows}
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
    parser.add_argument("--tokens", type=int, default=512, help="of the held-out split")
    parser.add_argument("--out", default="routing_map.html", help="page (default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
