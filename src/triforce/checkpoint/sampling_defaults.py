"""How the makers of a model would have it sampled: what generation_config.json says, as in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triforce.checkpoint.hub import read_json
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import BY_THE_MODEL, SamplingParams

FILE = "generation_config.json"


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the file of a model's folder sets. Raises ModelError."""
    values = read_json(folder / FILE) if (folder / FILE).exists() else {}
    found = {name: values[name] for name in BY_THE_MODEL if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder / FILE}: {error}; mend it, or leave the field out") from error
    return found
