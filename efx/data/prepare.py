"""Prepare the text of a config: read it once, tokenise it, and write token shards to the cache.

    python -m efx.data.prepare --config configs/mod.py --config.data.source=jsonl:PATH

A run that finds its text not prepared does the same. A command that was stopped resumes after its
last shard. With --shard=3/16 it tokenises each 16th part of the text, from the third on, so that 16
machines with one config.data.cache_dir share the work; a command without it does what is missing
and joins the parts. A part has some 256 MB of files; config.data.max_bytes makes one part.
"""

import logging
import re
import sys

from efx.config.flags import parse
from efx.config.load import to_config
from efx.data import tokenizers
from efx.data.texts import Texts
from efx.errors import UsageError

log = logging.getLogger("efx")


def arguments_of(argv):
    """(DataConfig, (I, N) of --shard) of a command line; None after --help."""
    shard = (1, 1)
    for argument in [each for each in argv if each.startswith("--shard=")]:
        match = re.fullmatch(r"--shard=([0-9]{1,6})/([0-9]{1,6})", argument)
        shard = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= shard[0] <= shard[1]:
            raise UsageError(f"{argument}: expected --shard=I/N with I in 1..N, as in --shard=3/16")
    others = [each for each in argv if not each.startswith("--shard=")]
    values = parse(others, usage=__doc__)
    return values and (to_config(values.config).data, shard)


def run(argv):
    """Prepare the text of a command line; UsageError for bad input."""
    arguments = arguments_of(argv)
    if not arguments:
        return
    config_data, shard = arguments
    tokenizer = tokenizers.pretrained_tokenizer(config_data.tokenizer)
    texts = Texts(config_data)
    left = texts.prepare(texts.tokenizer(tokenizer), shard)
    for text in texts.all():
        if text in left:
            log.info("%s: shard %d/%d is done; others are missing", text.name, *shard)
        else:
            tokens = len(text.shards.stream)
            log.info("%s: %s tokens in %s", text.name, f"{tokens:,}", text.shards.folder)


def main(argv=None):
    """Run the command line and return the exit status, see `efx.main`."""
    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler()]
    log.handlers[0].setFormatter(logging.Formatter("efx: %(message)s"))
    try:
        run(list(sys.argv if argv is None else argv))
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("efx: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
