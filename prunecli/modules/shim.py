"""The file that lets `AutoModel….from_pretrained(DIR, trust_remote_code=True)` open a checkpoint with prunecli."""

from __future__ import annotations

from collections.abc import Sequence

from prunecli import PACKAGE
from prunecli.model.declared import CLASS_PREFIX
from prunecli.model.opening import SHIM

SHIM_FILE = f"{SHIM}.py"
"""Written into every result that no stock class can run; named in its `auto_map`."""

_SOURCE = '''"""Opens this checkpoint with prunecli, which knows how it differs from its stock architecture."""

import os

from transformers import PreTrainedModel

SPREAD = ("balanced", "balanced_low_0", "sequential")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


class PrunecliModel(PreTrainedModel):
    """Stands in for the model class; `from_pretrained` returns the model that prunecli loads."""

    model_class = None

    @classmethod
    def from_pretrained(cls, path, *arguments, dtype=None, torch_dtype=None, device_map=None, **options):
        """Load on one device, by default the CPU; `dtype` is by default what `prunecli.load_model` chooses."""
        try:
            import prunecli
        except ImportError:
            raise ImportError(f"{path} is no stock model: opening it needs PACKAGE.") from None
        if isinstance(device_map, dict):
            if len(set(map(str, device_map.values()))) != 1:
                raise ValueError(f"device_map={device_map}: prunecli loads a model on one device.")
            device_map = next(iter(device_map.values()))
        if isinstance(device_map, int):
            device_map = f"cuda:{device_map}"
        for option in ("quantization_config", "output_loading_info"):
            if options.get(option):
                raise ValueError(f"{option}: prunecli does not know this option.")
        if not os.path.isdir(path):
            from huggingface_hub import snapshot_download

            hub = {name: options[name] for name in HUB_OPTIONS if options.get(name) is not None}
            path = snapshot_download(str(path), **hub)
        kind = torch_dtype if dtype is None else dtype
        device = "auto" if str(device_map) in SPREAD else device_map or "cpu"
        return prunecli.load_model(path, dtype=kind or "auto", device=device, model_class=cls.model_class)
'''

_CLASS = '''

class PREFIXNAME(PrunecliModel):
    """Stands in for NAME."""

    model_class = "NAME"
'''


def shim_source(classes: Sequence[str]) -> str:
    """The file's text for a checkpoint that these stock classes describe, each under a name of its own."""
    made = (_CLASS.replace("PREFIX", CLASS_PREFIX).replace("NAME", name) for name in classes)
    return _SOURCE.replace("PACKAGE", PACKAGE) + "".join(made)
