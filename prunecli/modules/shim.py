"""The file that lets `AutoModel….from_pretrained(DIR, trust_remote_code=True)` open a checkpoint with prunecli."""

from __future__ import annotations

SHIM_FILE = "modeling_prunecli.py"
"""Written into every result; named in its `auto_map`."""

SHIM_SOURCE = '''"""Opens this checkpoint with prunecli, which knows how it differs from its stock architecture."""

from transformers import PreTrainedConfig, PreTrainedModel


class PrunecliConfig(PreTrainedConfig):
    """The values of config.json as they are; prunecli builds the model from the file itself."""

    model_type = "prunecli-nllb-moe"


class PrunecliModel(PreTrainedModel):
    """Stands in for the model class; `from_pretrained` returns the model that prunecli loads."""

    config_class = PrunecliConfig

    @classmethod
    def from_pretrained(cls, path, *arguments, dtype=None, torch_dtype=None, device_map=None, **options):
        try:
            import prunecli
        except ImportError:
            raise ImportError(f"{path} was written by prunecli: `pip install prunecli` to open it.") from None
        dtype = "auto" if (dtype or torch_dtype) is None else str(dtype or torch_dtype).removeprefix("torch.")
        device = "cpu" if device_map is None else str(device_map)
        return prunecli.load_model(path, dtype=dtype, device=device)
'''
