"""What a model's folder holds, as whoever starts or describes a service must know it: the spec that ranks will read.

Native models are read here; for any other a subprocess asks transformers, so that this one does not load torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deploy.config import child_environment
from deploy.house import ROOT
from workers.models.document import load_object
from workers.models.generic.spec import GenericSpec
from workers.models.identity import ModelIdentity, is_native
from workers.models.reading import read_native
from workers.models.spec import ModelSpec, Unsupported

_WALK = "workers.models.generic.walk"
_LAST = 600
"""Characters of what a failed subprocess said that are worth repeating."""


def described(folder: Path) -> ModelSpec | GenericSpec:
    """The spec of the model in `folder`; seconds for one that is not native. Raises Unsupported with the reason."""
    config = load_object(folder / "config.json")
    if config is None or is_native(config):
        return read_native(folder)
    ModelIdentity.read(folder)  # what is refused by its name alone is refused at once
    environment = child_environment(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    command = [sys.executable, "-m", _WALK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise Unsupported(done.stderr.strip()[-_LAST:] or f"reading {folder} failed with status {done.returncode}")
    return GenericSpec.parse(json.loads(done.stdout.splitlines()[-1]))
