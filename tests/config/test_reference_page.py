"""The page of settings, `python -m efx.config.reference`, has each setting with its range."""

import re
import subprocess
import sys

from efx.config.names import setting_names
from efx.config.run import default_config
from efx.models import FAMILIES


def test_the_command_prints_every_setting_with_its_meaning(root):
    command = [sys.executable, "-m", "efx.config.reference"]
    page = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    found, block = {}, ""
    for line in page.splitlines():
        if line.startswith("### "):
            block = line.removeprefix("### ")
        elif row := re.fullmatch(r"\| (\w+) \| (.+) \| (`.*`) \| (.*) \|", line):
            found[f"{block}.{row[1]}"] = row.groups()
    every = {name for family in FAMILIES for name in setting_names(default_config(family))}
    assert every - {"config.rules"} == found.keys()
    assert found["config.steps"][1:3] == ("int, at least 0", "`1000`")
    assert "zero-based" in found["config.model.depth_routing.blocks"][3]
