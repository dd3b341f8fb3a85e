"""What tests do to the files of a run folder."""

import json


def edit(path, change):
    """Rewrites config.json or run.json as a user does who means it: without its checksum.

    change: what the contents, a dict, become.
    """
    contents = json.loads(path.read_text())
    del contents["checksum"]
    path.write_text(json.dumps(change(contents)))


def move(path, before, after):
    """Has config.json or run.json name the folder `after` where it named `before`."""
    edit(path, lambda contents: json.loads(json.dumps(contents).replace(str(before), str(after))))


def forget(run):
    """Has the checkpoints of a run know nothing of its other files, as those of an earlier efx."""
    for path in (run / "checkpoints").glob("*/efx_manifest.json"):
        manifest = json.loads(path.read_text())
        amended = manifest.get("amended", {}) | {"fingerprints": {}}
        path.write_text(json.dumps(manifest | {"amended": amended}))
